"""Launches index_logits' Gluon kernels: descriptors of queries and pages, and how a launch is divided."""

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.device import num_multiprocessors
from kernels.index_logits.call import IndexLogitsCall
from kernels.index_logits.hopper import is_tiled
from kernels.index_logits.hopper.spans import score_spans
from kernels.index_logits.hopper.tiles import score_tiles

# Of tiles: keys that a consumer holds in registers, queries on their way.
TILE_KEYS, TILE_STAGES = 64, 6
# Rows of an item by the logits of a launch: with few, larger items would be too few to share out. On an H200 items of
# 8, 16 and 32 rows take 78, 84 and 95 us for 2,048 rows of as many keys, 3,704, 3,613 and 3,566 for 65,536 keys.
TILE_ROWS = ((12 << 20, 8), (48 << 20, 16))
MOST_TILE_ROWS = 32
# Of spans: keys of a product, blocks on their way, the longest span and how many a program has at least.
SPAN_KEYS, SPAN_STAGES, MOST_SPAN, LEAST_SPANS = 128, 3, 2048, 4
SPAN_CONSUMERS = 2


def launch(call: IndexLogitsCall, out: torch.Tensor) -> None:
    """Launches over checked, non-empty arguments."""
    with torch.cuda.device_of(call.q):
        (_launch_tiles if is_tiled(call) else _launch_spans)(call, out)


def _launch_tiles(call: IndexLogitsCall, out: torch.Tensor) -> None:
    score_tiles[(num_multiprocessors(call.q.device),)](
        *_descriptors(call, TILE_KEYS),
        call.weights,
        call.block_tables,
        *call.rows,
        out,
        call.q.shape[0],
        call.max_keys,
        call.least_keys,
        *_strides(call),
        **_sizes(call),
        ROWS=tile_rows(call.q.shape[0], call.max_keys),
        KEYS=TILE_KEYS,
        STAGES=TILE_STAGES,
        num_warps=4,
    )


def tile_rows(num_rows: int, max_keys: int) -> int:
    """Returns the rows of an item."""
    return next((rows for logits, rows in TILE_ROWS if num_rows * max_keys < logits), MOST_TILE_ROWS)


def _launch_spans(call: IndexLogitsCall, out: torch.Tensor) -> None:
    programs, tokens = num_multiprocessors(call.q.device), call.q.shape[0]
    span = span_keys(tokens, call.max_keys, programs)
    spans = triton.cdiv(call.max_keys, span)
    score_spans[(min(programs, tokens * spans),)](
        *_descriptors(call, SPAN_KEYS),
        call.weights,
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
        STAGES=SPAN_STAGES,
        num_warps=4,
    )


def span_keys(num_rows: int, max_keys: int, programs: int) -> int:
    """Returns the keys of a span: fewer where programs would have fewer than LEAST_SPANS each, down to one block."""
    span = MOST_SPAN
    while span > SPAN_KEYS * SPAN_CONSUMERS and num_rows * max_keys < LEAST_SPANS * span * programs:
        span //= 2
    return span


def _descriptors(call: IndexLogitsCall, keys: int) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Boxes of one query's heads, and of a page's keys or of `keys` of them."""
    q, pages = call.q, call.pages
    (tokens, heads, dim), page_tokens = q.shape, pages.shape[1]
    rows = (pages.shape[0] - 1) * (pages.stride(0) // dim) + page_tokens
    return (
        TensorDescriptor(q, [tokens, heads, dim], [q.stride(0), dim, 1], [1, heads, dim], _shared(3)),
        TensorDescriptor(pages, [rows, dim], [dim, 1], [min(page_tokens, keys), dim], _shared(2)),
    )


def _strides(call: IndexLogitsCall) -> tuple[int, int, int]:
    """Elements between tokens' weights and between tables; rows between pages."""
    return call.weights.stride(0), call.block_tables.stride(0), call.pages.stride(0) // call.q.shape[2]


def _sizes(call: IndexLogitsCall) -> dict[str, int]:
    return {"HEADS": call.q.shape[1], "DIM": call.q.shape[2], "PAGE": call.pages.shape[1]}


def _shared(rank: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=rank)
