"""compress_tokens in Triton: one program for one token writes its raw row, and where it ends a block the entry too.

An entry's raw rows come from the launch where they are of it, since other programs write them to pages at that time,
and from pages where they are older. They are read CHUNK at a time, in ascending order, with one softmax over all of
them for each element.

    overlap    | block before: first halves | own block: second halves |      rows 0 .. ROWS - 1 of the entry
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.compress_tokens.call import CompressCall
from kernels.rotation.triton import store_normed_tail
from kernels.softmax.triton import MASKED, NO_KEYS

# Raw rows at a time: an entry's all, up to as many as eight warps hold of 512 elements without a spill.
MOST_CHUNK = 64
# (least elements of a chunk, warps of a program), the largest first. Measured on an H200.
WARPS = ((32_768, 8), (4_096, 2), (0, 1))


class Tile(NamedTuple):
    """Raw rows that are read at a time, and a program's warps."""

    chunk: int
    warps: int


def tile_of(ratio: int, overlap: bool, block_dim: int) -> Tile:
    """Returns how entries of this kind are summed: their bits follow from it, so nothing of a launch is asked."""
    chunk = min(triton.next_power_of_2(2 * ratio if overlap else ratio), MOST_CHUNK)
    return Tile(chunk, next(warps for least, warps in WARPS if chunk * block_dim >= least))


@triton.jit
def weighted_sum(
    raw_ptr,
    pages_ptr,
    table_ptr,
    sequences_ptr,
    num_keys_ptr,
    bias_ptr,
    token,
    sequence,
    num_keys,
    stride_raw,
    stride_page,
    RATIO: tl.constexpr,
    OVERLAP: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Returns the block that ends with this token, each element [BLOCK_D] weighted by its gates' softmax, in fp32."""
    ROWS: tl.constexpr = 2 * RATIO if OVERLAP else RATIO
    HALF: tl.constexpr = 2 * D if OVERLAP else D
    d = tl.arange(0, BLOCK_D)[None, :]
    highest = tl.full([BLOCK_D], NO_KEYS, tl.float32)
    total = tl.zeros([BLOCK_D], tl.float32)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for start in tl.range(0, ROWS, CHUNK):
        row = start + tl.arange(0, CHUNK)
        position = num_keys - ROWS + row
        ok = (row < ROWS) & (position >= 0)
        # Rows of a sequence are neighbours in a launch.
        at = token - (num_keys - 1 - position)
        fresh = ok & (at >= 0)
        fresh = fresh & (tl.load(sequences_ptr + at, mask=fresh, other=-1) == sequence)
        fresh = fresh & (tl.load(num_keys_ptr + at, mask=fresh, other=0) == position + 1)
        page = tl.load(table_ptr + position // PAGE, mask=ok & (fresh == 0), other=0).to(tl.int64)
        row_ptr = pages_ptr + page * stride_page + position % PAGE * (2 * HALF)
        row_ptr = tl.where(fresh, raw_ptr + at * stride_raw, row_ptr)
        bias_at = row % RATIO * HALF
        if OVERLAP:
            own = tl.where(row >= RATIO, D, 0)
            row_ptr += own
            bias_at += own
        mask = ok[:, None] & (d < D)
        values = tl.load(row_ptr[:, None] + d, mask=mask, other=0.0).to(tl.float32)
        gates = tl.load(row_ptr[:, None] + (HALF + d), mask=mask, other=0.0).to(tl.float32)
        gates += tl.load(bias_ptr + bias_at[:, None] + d, mask=mask, other=0.0)
        gates = tl.where(mask, gates, MASKED)
        new_highest = tl.maximum(highest, tl.max(gates, 0))
        weights = tl.exp(gates - new_highest[None, :])
        decay = tl.exp(highest - new_highest)
        total = total * decay + tl.sum(weights, 0)
        acc = acc * decay + tl.sum(values * weights, 0)
        highest = new_highest
    # What only fills the tile up has no weight.
    return acc / tl.where(total == 0.0, 1.0, total)


# What changes from batch to batch is not specialised on: a new value must not mean a new compilation.
@triton.jit(do_not_specialize=["stride_tables_seq", "stride_entry_tables_seq"])
def compress_rows(
    raw_ptr,
    pages_ptr,
    slots_ptr,
    tables_ptr,
    sequences_ptr,
    num_keys_ptr,
    entry_pages_ptr,
    entry_tables_ptr,
    bias_ptr,
    norm_ptr,
    cos_sin_ptr,
    eps,
    stride_raw,
    stride_page,
    stride_entry_page,
    stride_tables_seq,
    stride_entry_tables_seq,
    RATIO: tl.constexpr,
    OVERLAP: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    OF_PAGE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    PARTS: tl.constexpr = 4 if OVERLAP else 2
    token = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    slot = tl.load(slots_ptr + token)
    kept = (d < D) & (slot >= 0)
    page_row = pages_ptr + slot // PAGE * stride_page + slot % PAGE * (PARTS * D)
    for part in tl.static_range(PARTS):
        row = tl.load(raw_ptr + token * stride_raw + part * D + d, mask=kept)
        tl.store(page_row + part * D + d, row, mask=kept)
    num_keys = tl.load(num_keys_ptr + token)
    if (num_keys > 0) & (num_keys % RATIO == 0):
        sequence = tl.load(sequences_ptr + token)
        table_ptr = tables_ptr + sequence.to(tl.int64) * stride_tables_seq
        made = weighted_sum(
            raw_ptr, pages_ptr, table_ptr, sequences_ptr, num_keys_ptr, bias_ptr, token, sequence, num_keys,
            stride_raw, stride_page, RATIO, OVERLAP, D, PAGE, CHUNK, BLOCK_D,
        )  # fmt: skip
        entry = num_keys // RATIO - 1
        entry_table_ptr = entry_tables_ptr + sequence.to(tl.int64) * stride_entry_tables_seq
        page = tl.load(entry_table_ptr + entry // OF_PAGE).to(tl.int64)
        entry_ptr = entry_pages_ptr + page * stride_entry_page + entry % OF_PAGE * D
        angle_ptr = cos_sin_ptr + (num_keys - RATIO).to(tl.int64) * (2 * HALF)
        store_normed_tail(made, entry_ptr, norm_ptr, angle_ptr, eps, d < D, D, HALF, BLOCK_D)


def launch(call: CompressCall) -> None:
    """Fills the slots and the entries; checked, non-empty arguments."""
    rule, dim = call.rule, call.entry_pages.shape[2]
    block_dim = triton.next_power_of_2(dim)
    tile = tile_of(rule.ratio, rule.overlap, block_dim)
    with torch.cuda.device_of(call.raw):
        compress_rows[(call.raw.shape[0],)](
            call.raw,
            call.raw_pages,
            call.raw_slots,
            call.raw_tables,
            *call.rows,
            call.entry_pages,
            call.entry_tables,
            rule.bias,
            rule.norm,
            rule.cos_sin,
            rule.eps,
            call.raw.stride(0),
            call.raw_pages.stride(0),
            call.entry_pages.stride(0),
            call.raw_tables.stride(0),
            call.entry_tables.stride(0),
            RATIO=rule.ratio,
            OVERLAP=rule.overlap,
            D=dim,
            HALF=rule.turned // 2,
            PAGE=call.raw_pages.shape[1],
            OF_PAGE=call.entry_pages.shape[1],
            CHUNK=tile.chunk,
            BLOCK_D=block_dim,
            num_warps=tile.warps,
        )
