"""gather_latent in Triton: pure traffic, one program for a few rows of the result.

Each row finds its own by a search in cu_seqlens_k, so no list of rows is
built on the host, and lengths may differ in any way.
"""

import torch
import triton
import triton.language as tl

from kernels.addressing import search_levels
from kernels.addressing.triton import sequence_of
from kernels.launches import allow_next_launch_and_wait, overlap_options

# A row of 576 is 1152 bytes: two need so few registers of a lane that a multiprocessor holds all programs that it may.
ROWS = 2


# What changes from batch to batch is not specialised on: a new value must not mean a new compilation.
@triton.jit(do_not_specialize=["num_seqs", "stride_tables_seq"])
def gather_rows(
    pages_ptr,
    tables_ptr,
    cu_k_ptr,
    new_ptr,
    cu_q_ptr,
    first_positions_ptr,
    out_ptr,
    num_seqs,
    stride_page,
    stride_tables_seq,
    stride_new_token,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    MAIN: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    ROWS: tl.constexpr,
    LEVELS: tl.constexpr,
    HAS_NEW: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    allow_next_launch_and_wait(OVERLAPS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < tl.load(cu_k_ptr + num_seqs)
    seq, begin = sequence_of(row, cu_k_ptr, num_seqs, LEVELS)
    position = row - begin
    cached = live
    if HAS_NEW:
        # New rows are counted from the sequence's end, which needs its cached length nowhere.
        left = tl.load(cu_k_ptr + seq + 1) - row
        stop_q = tl.load(cu_q_ptr + seq + 1)
        cached = live & (left > stop_q - tl.load(cu_q_ptr + seq))
    if HAS_FIRST:
        position += tl.load(first_positions_ptr + seq)
    table = tables_ptr + seq.to(tl.int64) * stride_tables_seq
    page = tl.load(table + position // PAGE, mask=cached, other=0).to(tl.int64)
    source_row = pages_ptr + page * stride_page + position % PAGE * WIDTH
    if HAS_NEW:
        new_row = new_ptr + (stop_q - left).to(tl.int64) * stride_new_token
        source_row = tl.where(cached, source_row, new_row)
    out_row = out_ptr + row.to(tl.int64) * WIDTH
    d = tl.arange(0, MAIN)[None, :]
    rest = MAIN + tl.arange(0, BLOCK_REST)[None, :]
    has_main = live[:, None]
    has_rest = live[:, None] & (rest < WIDTH)
    # Both loads are under way before either store waits.
    main_part = tl.load(source_row[:, None] + d, mask=has_main)
    rest_part = tl.load(source_row[:, None] + rest, mask=has_rest)
    tl.store(out_row[:, None] + d, main_part, mask=has_main)
    tl.store(out_row[:, None] + rest, rest_part, mask=has_rest)


def launch(
    pages: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    new_latents: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    first_positions: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Fills out's rows up to cu_seqlens_k's end; checked, non-empty arguments."""
    num_seqs, width = block_tables.shape[0], pages.shape[2]
    main = 1 << (width.bit_length() - 1)
    with torch.cuda.device_of(pages):
        gather_rows[(triton.cdiv(out.shape[0], ROWS),)](
            pages,
            block_tables,
            cu_seqlens_k,
            out if new_latents is None else new_latents,
            cu_seqlens_k if cu_seqlens_q is None else cu_seqlens_q,
            cu_seqlens_k if first_positions is None else first_positions,
            out,
            num_seqs,
            pages.stride(0),
            block_tables.stride(0),
            0 if new_latents is None else new_latents.stride(0),
            WIDTH=width,
            PAGE=pages.shape[1],
            MAIN=main,
            BLOCK_REST=triton.next_power_of_2(max(1, width - main)),
            ROWS=ROWS,
            LEVELS=search_levels(num_seqs),
            HAS_NEW=new_latents is not None,
            HAS_FIRST=first_positions is not None,
            num_warps=1,
            **overlap_options(pages.device),
        )
