"""The plan of a decode step in Triton: lengths in, chunks of work out, all in device memory.

Knows no page and no layer: a plan holds for every layer of a step, windowed or not.

A pair is one sequence and one kv head; its keys are leaves of LEAF keys. Leaves are numbered pair after pair, and a
chunk is a run of them: first a large one for each program, together most of the work, then small ones, which whoever
has finished draws from a counter. So programs end at the same time, though some are slower than others.

    pairs     | seq 0 head 0 | seq 0 head 1 | ... | seq 1 head 0 | ...
    leaves    | 0  1  2  3   | 4  5  6  7   |
    chunks    |     0     |     1     | 2 | 3 |
"""

import torch
import triton
import triton.language as tl

import kernels.decode_attention.plan as plan_module
from kernels.decode_attention.plan import CHUNK_FIELDS

BLOCK_ELEMENTS = 8192


@triton.jit
def chunk_sizes(
    leaves,
    groups,
    programs,
    max_chunks,
    GROUP: tl.constexpr,
    SHARE: tl.constexpr,
    DRAWS: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """(number of large chunks, leaves of a large one, of a small one); whole groups where a chunk has several."""
    large = leaves * SHARE // (8 * programs)
    large = tl.where(large >= GROUP, large // GROUP * GROUP, large)
    count = tl.where(large > 0, programs, 0)
    small = tl.cdiv(leaves - count * large, programs * DRAWS)
    small = tl.where(small >= GROUP, small // GROUP * GROUP, small)
    if ALIGN & (groups <= programs) & (groups * 8 >= programs * 7):
        count = 0
        small = GROUP
    small = tl.maximum(small, tl.cdiv(leaves - count * large, max_chunks - count))
    return count, large, small


# What changes from batch to batch is not specialised on: a new value must not mean a new compilation.
@triton.jit(do_not_specialize=["num_seqs"])
def plan_chunks(
    seqlens_ptr,
    bases_ptr,
    header_ptr,
    chunks_ptr,
    num_seqs,
    programs,
    max_chunks,
    HEADS: tl.constexpr,
    LEAF: tl.constexpr,
    GROUP: tl.constexpr,
    SHARE: tl.constexpr,
    DRAWS: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    CHUNK_FIELDS: tl.constexpr,
):
    """Every program of the plan sums over all sequences and writes its own slice of the chunks."""
    seq = tl.arange(0, BLOCK_SEQS)
    real = seq < num_seqs
    length = tl.load(seqlens_ptr + seq, mask=real, other=0)
    leaves = tl.where(real, tl.maximum(tl.cdiv(length, LEAF), 1), 0)
    groups = tl.cdiv(leaves, GROUP)
    base = tl.cumsum(leaves, 0) - leaves
    total = tl.sum(leaves, 0) * HEADS
    group_total = tl.sum(groups, 0) * HEADS
    large_count, large, small = chunk_sizes(total, group_total, programs, max_chunks, GROUP, SHARE, DRAWS, ALIGN)
    count = large_count + tl.cdiv(total - large_count * large, small)
    if tl.program_id(0) == 0:
        tl.store(bases_ptr + 2 * seq, base, mask=real)
        tl.store(bases_ptr + 2 * seq + 1, tl.cumsum(groups, 0) - groups, mask=real)
        tl.store(header_ptr, large_count)
        tl.store(header_ptr + 1, large)
        tl.store(header_ptr + 2, small)
        tl.store(header_ptr + 3, total)

    chunk = tl.program_id(0) * BLOCK_CHUNKS + tl.arange(0, BLOCK_CHUNKS)
    is_large = chunk < large_count
    first = tl.where(is_large, chunk * large, large_count * large + (chunk - large_count) * small)
    size = tl.where(is_large, large, tl.minimum(small, total - first))
    size = tl.where(chunk < count, size, 0)
    before = ((base * HEADS)[None, :] <= first[:, None]) & real[None, :]
    owner = tl.maximum(tl.sum(before.to(tl.int32), 1) - 1, 0)
    own = seq[None, :] == owner[:, None]
    own_leaves = tl.maximum(tl.sum(tl.where(own, leaves[None, :], 0), 1), 1)
    offset = first - tl.sum(tl.where(own, base[None, :], 0), 1) * HEADS
    at = chunks_ptr + chunk * CHUNK_FIELDS
    ok = chunk < max_chunks
    tl.store(at, owner, mask=ok)
    tl.store(at + 1, offset // own_leaves % HEADS, mask=ok)
    tl.store(at + 2, offset % own_leaves, mask=ok)
    tl.store(at + 3, size, mask=ok)
    tl.store(at + 4, tl.sum(tl.where(own, length[None, :], 0), 1), mask=ok)
    tl.store(at + 5, count + tl.zeros_like(chunk), mask=ok)


def launch(
    seqlens_k: torch.Tensor,
    bases: torch.Tensor,
    header: torch.Tensor,
    chunks: torch.Tensor,
    *,
    kv_heads: int,
    programs: int,
    leaf: int,
    group: int,
    share: int,
    draws: int,
) -> None:
    """Launches over at least one sequence; `chunks` has CHUNK_FIELDS fields for each chunk there is room for."""
    num_seqs, max_chunks = seqlens_k.shape[0], chunks.shape[0] // CHUNK_FIELDS
    block_seqs = max(16, triton.next_power_of_2(num_seqs))
    block_chunks = max(1, min(64, BLOCK_ELEMENTS // block_seqs))
    with torch.cuda.device_of(seqlens_k):
        plan_chunks[(triton.cdiv(max_chunks, block_chunks),)](
            seqlens_k,
            bases,
            header,
            chunks,
            num_seqs,
            programs,
            max_chunks,
            HEADS=kv_heads,
            LEAF=leaf,
            GROUP=group,
            SHARE=share,
            DRAWS=draws,
            ALIGN=plan_module.ALIGN,
            BLOCK_SEQS=block_seqs,
            BLOCK_CHUNKS=block_chunks,
            CHUNK_FIELDS=CHUNK_FIELDS,
            num_warps=4,
        )
