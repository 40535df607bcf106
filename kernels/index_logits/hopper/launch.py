"""Launches index_logits' Gluon kernels: descriptors of queries and pages, and how a launch is divided."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.device import num_multiprocessors
from kernels.index_logits.call import IndexLogitsCall
from kernels.index_logits.hopper import is_tiled
from kernels.index_logits.hopper.blocks import score_blocks
from kernels.index_logits.hopper.spans import score_spans
from kernels.index_logits.hopper.tiles import score_tiles
from kernels.index_logits.hopper.wide import score_wide
from kernels.index_logits.hopper.wide_scores import KEYS


class TileShape(NamedTuple):
    """Consumers of a program, products of each for a row and their keys, rows that follow each other without a gap in
    the products, and queries on their way."""

    parts: int
    products: int
    keys: int
    chained: int
    stages: int


# By the bytes of an element; fp8 keys take half the registers. On an H200, 2,048 rows behind 63,488 fp8 keys take 2.16
# ms, 2.19 with rows one by one, 2.49 with four in a chain, 2.41 with (2, 2, 64, 4, 12), 2.55 with (4, 1, 64, 1, 12). In
# bf16 3.42 ms, 3.57 with rows one by one, 3.44 with (2, 2, 64, 4, 8).
TILES = {2: TileShape(4, 1, 64, 2, 6), 1: TileShape(3, 2, 64, 2, 12)}
# Rows of an item: where a launch has few logits, larger items would be too few to share out. On an H200 items of 8, 16
# and 32 rows take 70, 74 and 85 us for 2,048 rows of as many keys in bf16, 277, 268 and 263 behind 4,096 keys, 3.55,
# 3.41 and 3.34 ms behind 63,488; over fp8 keys 54, 61 and 59 us, 209, 205 and 203, 2.37, 2.25 and 2.19 ms.
FEW_LOGITS, FEW_LOGITS_ROWS, TILE_ROWS = 12 << 20, 8, 32
# Launches of as many logits over keys of 16 bits have wide blocks, and of more logits tiles of more rows. On an H200
# 2,048 rows behind 4,096, 14,336 and 63,488 keys take 297, 764 and 3,236 us with tiles of 32 rows, 296, 799 and 3,195
# of 64, 389, 808 and 3,302 of 128, in `score_tiles` 269, 813 and 3,419. With blocks of 384 keys 63,488 take 3,359 us.
WIDE_LOGITS, WIDE_KEYS, WIDE_ROWS, WIDER_LOGITS, WIDER_ROWS = 24 << 20, 512, 32, 64 << 20, 64
# Other launches with at most this number of logits have a program for each block of keys of a row. Microseconds on an
# H200 with blocks and with spans, rows of 65,536 keys, bf16 and fp8: 1 row 11.1, 12.6 and 8.3, 10.9; 4 rows 27.3, 29.1
# and 17.7, 22.0; 16 rows 77.5, 79.6 and 48.9, 53.2.
MOST_BLOCK_LOGITS = 1 << 20
# Of what these were compared with the other kernels on an H200: heads, tokens of a page.
BLOCK_CASE = (64, 64)
# Keys of a block by the bytes of an element. With 64, 128 and 256 a row takes 11.2, 11.1 and 11.9 us, over fp8 keys
# 8.3, 8.8 and 9.1.
BLOCK_KEYS = {2: 128, 1: 64}
# Of spans: keys of a product, blocks on their way by the bytes of an element, the longest span and how many a program
# has at least.
SPAN_KEYS, SPAN_STAGES, MOST_SPAN, LEAST_SPANS = 128, {2: 3, 1: 6}, 2048, 4
SPAN_CONSUMERS = 2


def launch(call: IndexLogitsCall, out: torch.Tensor) -> None:
    """Launches over checked, non-empty arguments."""
    with torch.cuda.device_of(call.q):
        launch_by(call)(call, out)


def launch_by(call: IndexLogitsCall) -> Callable[[IndexLogitsCall, torch.Tensor], None]:
    """Returns what launches a case, judged by the sizes that the host knows."""
    if is_tiled(call):
        is_wide = call.scales is None and call.q.shape[0] * call.max_keys >= WIDE_LOGITS
        return _launch_wide if is_wide else _launch_tiles
    is_few = call.q.shape[0] * call.max_keys <= MOST_BLOCK_LOGITS
    case = (call.q.shape[1], call.pages.shape[1])
    return _launch_blocks if is_few and case == BLOCK_CASE and call.q.dtype is not torch.float16 else _launch_spans


def _launch_wide(call: IndexLogitsCall, out: torch.Tensor) -> None:
    rows, sizes = call.q.shape[0], _sizes(call)
    del sizes["HAS_SCALES"]
    of_weights, _, of_tables, page_rows = _strides(call)
    score_wide[(num_multiprocessors(call.q.device),)](
        *_descriptors(call, KEYS.value, 2),
        _weights_descriptor(call.weights),
        call.block_tables,
        *call.rows,
        out,
        rows,
        call.max_keys,
        call.least_keys,
        of_weights,
        of_tables,
        page_rows,
        **sizes,
        ROWS=WIDE_ROWS if rows * call.max_keys < WIDER_LOGITS else WIDER_ROWS,
        BLOCK=WIDE_KEYS,
        num_warps=4,
    )


def _launch_tiles(call: IndexLogitsCall, out: torch.Tensor) -> None:
    tile = TILES[call.q.element_size()]
    score_tiles[(num_multiprocessors(call.q.device),)](
        *_descriptors(call, tile.keys),
        _weights_descriptor(call.weights),
        call.weights if call.scales is None else call.scales,
        call.block_tables,
        *call.rows,
        out,
        call.q.shape[0],
        call.max_keys,
        call.least_keys,
        *_strides(call),
        **_sizes(call),
        ROWS=tile_rows(call.q.shape[0], call.max_keys),
        PARTS=tile.parts,
        PRODUCTS=tile.products,
        KEYS=tile.keys,
        CHAINED=tile.chained,
        STAGES=tile.stages,
        num_warps=4,
    )


def tile_rows(num_rows: int, max_keys: int) -> int:
    """Returns the rows of an item."""
    return FEW_LOGITS_ROWS if num_rows * max_keys < FEW_LOGITS else TILE_ROWS


def _launch_blocks(call: IndexLogitsCall, out: torch.Tensor) -> None:
    keys = BLOCK_KEYS[call.q.element_size()]
    score_blocks[(triton.cdiv(call.max_keys, keys), call.q.shape[0])](
        call.q,
        call.pages,
        call.weights,
        call.weights if call.scales is None else call.scales,
        call.block_tables,
        *call.rows,
        out,
        call.max_keys,
        call.least_keys,
        call.q.stride(0),
        *_strides(call),
        **_sizes(call),
        KEYS=keys,
        num_warps=4,
        launch_pdl=True,
    )


def _launch_spans(call: IndexLogitsCall, out: torch.Tensor) -> None:
    programs, tokens = num_multiprocessors(call.q.device), call.q.shape[0]
    span = span_keys(tokens, call.max_keys, programs)
    spans = triton.cdiv(call.max_keys, span)
    score_spans[(min(programs, tokens * spans),)](
        *_descriptors(call, SPAN_KEYS),
        call.weights,
        call.weights if call.scales is None else call.scales,
        call.block_tables,
        *call.rows,
        out,
        tokens * spans,
        spans,
        call.max_keys,
        call.least_keys,
        *_strides(call),
        **_sizes(call),
        SPAN=span,
        KEYS=SPAN_KEYS,
        STAGES=SPAN_STAGES[call.q.element_size()],
        num_warps=4,
    )


def span_keys(num_rows: int, max_keys: int, programs: int) -> int:
    """Returns the keys of a span: fewer where programs would have fewer than LEAST_SPANS each, down to one block."""
    span = MOST_SPAN
    while span > SPAN_KEYS * SPAN_CONSUMERS and num_rows * max_keys < LEAST_SPANS * span * programs:
        span //= 2
    return span


def _descriptors(call: IndexLogitsCall, keys: int, rows: int = 1) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Boxes of the heads of `rows` queries, and of a page's keys or of `keys` of them."""
    q, pages = call.q, call.pages
    (tokens, heads, dim), page_tokens = q.shape, pages.shape[1]
    page_rows = (pages.shape[0] - 1) * (pages.stride(0) // dim) + page_tokens
    return (
        TensorDescriptor(q, [tokens, heads, dim], [q.stride(0), dim, 1], [rows, heads, dim], _shared(q, 3)),
        TensorDescriptor(pages, [page_rows, dim], [dim, 1], [min(page_tokens, keys), dim], _shared(q, 2)),
    )


def _weights_descriptor(weights: torch.Tensor) -> TensorDescriptor:
    """Boxes of one query's weights, in one dimension."""
    (tokens, heads), stride = weights.shape, weights.stride(0)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    return TensorDescriptor(weights, [(tokens - 1) * stride + heads], [1], [heads], layout)


def _strides(call: IndexLogitsCall) -> tuple[int, int, int, int]:
    """Elements between tokens' weights, between pages' scales and between tables; rows between pages."""
    of_scales = 0 if call.scales is None else call.scales.stride(0)
    return call.weights.stride(0), of_scales, call.block_tables.stride(0), call.pages.stride(0) // call.q.shape[2]


def _sizes(call: IndexLogitsCall) -> dict[str, int]:
    (_, heads, dim), has_scales = call.q.shape, call.scales is not None
    return {"HEADS": heads, "DIM": dim, "PAGE": call.pages.shape[1], "HAS_SCALES": has_scales}


def _shared(rows: torch.Tensor, rank: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * rows.element_size(), rank=rank)
