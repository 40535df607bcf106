"""The plan of a decode step in Triton: lengths in, chunks of work out, all in device memory.

A plan holds for every layer of a step, windowed or not.

A pair is one sequence and one kv head; its keys are leaves of LEAF keys, its leaves groups of LEAVES_PER_GROUP. The
unit of work is a group, or a leaf where groups are too few to fill the card. Units are numbered pair after pair, and a
chunk is a run of `per` of them. There are several chunks for each program where there is enough work: a program that
has finished one draws the next, so programs end at the same time though some are slower than others.

    pairs     | seq 0 head 0 | seq 0 head 1 | ... | seq 1 head 0 | ...
    units     | 0  1  2  3   | 4  5  6  7   |
    chunks    |  0    |  1   |   2   |   3  |                           here with per = 2
"""

import torch
import triton
import triton.language as tl

from kernels.decode_attention.plan import CHUNK_FIELDS

BLOCK_ELEMENTS = 8192


@triton.jit
def groups_per_chunk(groups, programs, WAVES: tl.constexpr):
    """Returns groups per chunk: ceil(groups / (programs * WAVES)), but 2 instead of 1 if that takes no more rounds.

    With 2 a pair of two groups, say 4,096 keys, stays in one chunk and needs no merge.
    """
    per = tl.maximum(tl.cdiv(groups, programs * WAVES), 1)
    two = 2 * tl.cdiv(tl.cdiv(groups, 2), programs) <= tl.cdiv(groups, programs)
    return tl.where((per == 1) & two, 2, per)


# What changes from batch to batch is not specialised on: a new value must not mean a new compilation.
@triton.jit(do_not_specialize=["num_seqs"])
def plan_chunks(
    seqlens_ptr,
    bases_ptr,
    chunks_ptr,
    num_seqs,
    programs,
    max_chunks,
    HEADS: tl.constexpr,
    LEAF: tl.constexpr,
    LEAVES_PER_GROUP: tl.constexpr,
    WAVES: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    CHUNK_FIELDS: tl.constexpr,
):
    """Every program of the plan sums over all sequences and writes its own slice of the chunks."""
    seq = tl.arange(0, BLOCK_SEQS)
    real = seq < num_seqs
    length = tl.load(seqlens_ptr + seq, mask=real, other=0)
    units = tl.where(real, tl.maximum(tl.cdiv(length, LEAF * LEAVES_PER_GROUP), 1), 0)
    groups = tl.sum(units, 0) * HEADS
    unit = LEAVES_PER_GROUP
    per = groups_per_chunk(groups, programs, WAVES)
    if groups * 8 < programs * 7:
        unit = 1
        units = tl.where(real, tl.maximum(tl.cdiv(length, LEAF), 1), 0)
        per = tl.cdiv(tl.sum(units, 0) * HEADS, programs)
    total = tl.sum(units, 0) * HEADS
    per = tl.maximum(per, tl.cdiv(total, max_chunks))
    base = tl.cumsum(units, 0) - units
    if tl.program_id(0) == 0:
        tl.store(bases_ptr + seq, base, mask=real)

    chunk = tl.program_id(0) * BLOCK_CHUNKS + tl.arange(0, BLOCK_CHUNKS)
    first = chunk * per
    before = ((base * HEADS)[None, :] <= first[:, None]) & real[None, :]
    owner = tl.maximum(tl.sum(before.to(tl.int32), 1) - 1, 0)
    own = seq[None, :] == owner[:, None]
    own_units = tl.maximum(tl.sum(tl.where(own, units[None, :], 0), 1), 1)
    offset = first - tl.sum(tl.where(own, base[None, :], 0), 1) * HEADS
    at = chunks_ptr + chunk * CHUNK_FIELDS
    ok = chunk < max_chunks
    nil = tl.zeros_like(chunk)
    tl.store(at, owner, mask=ok)
    tl.store(at + 1, offset // own_units % HEADS, mask=ok)
    tl.store(at + 2, offset % own_units, mask=ok)
    tl.store(at + 3, tl.maximum(tl.minimum(per, total - first), 0), mask=ok)
    tl.store(at + 4, tl.sum(tl.where(own, length[None, :], 0), 1), mask=ok)
    tl.store(at + 5, tl.cdiv(total, per) + nil, mask=ok)
    tl.store(at + 6, unit + nil, mask=ok)
    tl.store(at + 7, per + nil, mask=ok)


def launch(
    seqlens_k: torch.Tensor,
    bases: torch.Tensor,
    chunks: torch.Tensor,
    *,
    kv_heads: int,
    programs: int,
    leaf: int,
    leaves_per_group: int,
    waves: int,
) -> None:
    """Launches over at least one sequence; `chunks` has CHUNK_FIELDS fields for each chunk there is room for."""
    num_seqs, max_chunks = seqlens_k.shape[0], chunks.shape[0] // CHUNK_FIELDS
    block_seqs = max(16, triton.next_power_of_2(num_seqs))
    block_chunks = max(1, min(64, BLOCK_ELEMENTS // block_seqs))
    with torch.cuda.device_of(seqlens_k):
        plan_chunks[(triton.cdiv(max_chunks, block_chunks),)](
            seqlens_k,
            bases,
            chunks,
            num_seqs,
            programs,
            max_chunks,
            HEADS=kv_heads,
            LEAF=leaf,
            LEAVES_PER_GROUP=leaves_per_group,
            WAVES=waves,
            BLOCK_SEQS=block_seqs,
            BLOCK_CHUNKS=block_chunks,
            CHUNK_FIELDS=CHUNK_FIELDS,
            num_warps=4,
        )
