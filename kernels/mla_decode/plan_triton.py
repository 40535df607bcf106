"""The plan of mla_decode in Triton: one program lists one sequence's items.

Items come longest first. What is too long for one program is shared out by groups of leaves where that keeps the
programs as busy as leaves would: fewer partial results to write and to fold.
"""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from kernels.mla_decode.plan import MlaDecodePlan


@triton.jit(do_not_specialize=["num_seqs"])
def list_items(
    items_ptr,
    counts_ptr,
    shared_ptr,
    lengths_ptr,
    cu_q_ptr,
    num_seqs,
    programs,
    HEADS: tl.constexpr,
    LEAF: tl.constexpr,
    LEAVES_PER_GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    MULTI: tl.constexpr,
    SEQS: tl.constexpr,
    STEP: tl.constexpr,
):
    seqs = tl.arange(0, SEQS)
    ok = seqs < num_seqs
    length = tl.load(lengths_ptr + seqs, mask=ok, other=0)
    if MULTI:
        q_start = tl.load(cu_q_ptr + seqs, mask=ok, other=0)
        q_len = tl.load(cu_q_ptr + seqs + 1, mask=ok, other=0) - q_start
    else:
        q_start = seqs
        q_len = tl.where(ok, 1, 0)
    tiles = (q_len * HEADS + ROWS - 1) // ROWS
    leaves = tl.maximum((length + LEAF - 1) // LEAF, 1)
    share = (tl.sum(tiles * leaves, 0) + programs - 1) // programs
    # A tile that takes a program hardly longer than its share of the batch is not split, and needs no fold.
    enough = share + share // 8
    whole = leaves <= enough
    groups = tl.sum(tl.where(whole, 0, tiles * ((leaves + LEAVES_PER_GROUP - 1) // LEAVES_PER_GROUP)), 0)
    step = tl.where((groups + programs - 1) // programs * LEAVES_PER_GROUP <= enough, LEAVES_PER_GROUP, 1)
    parts = tl.where(whole, 1, (leaves + step - 1) // step)
    items = tiles * parts
    slots = tl.where(whole, 0, items)
    key = tl.where(whole, leaves, step)

    seq = tl.program_id(0)
    mine = seqs == seq
    own_key = tl.sum(tl.where(mine, key, 0), 0)
    own_tiles = tl.sum(tl.where(mine, tiles, 0), 0)
    own_leaves = tl.sum(tl.where(mine, leaves, 0), 0)
    own_length = tl.sum(tl.where(mine, length, 0), 0)
    own_start = tl.sum(tl.where(mine, q_start, 0), 0)
    own_queries = tl.sum(tl.where(mine, q_len, 0), 0)
    own_parts = tl.sum(tl.where(mine, parts, 0), 0)
    own_items = own_tiles * own_parts
    ahead = (key > own_key) | ((key == own_key) & (seqs < seq))
    base = tl.sum(tl.where(ahead, items, 0), 0)
    slot_base = tl.sum(tl.where(seqs < seq, slots, 0), 0)
    shared = tl.sum(tl.where(mine, slots, 0), 0) > 0
    if seq == 0:
        tl.store(counts_ptr, tl.sum(items, 0))
        tl.store(counts_ptr + 1, step)
        tl.store(counts_ptr + 2, tl.sum((slots > 0).to(tl.int32), 0))
    if shared:
        at = shared_ptr + tl.sum(((slots > 0) & (seqs < seq)).to(tl.int32), 0) * 4
        tl.store(at, own_start)
        tl.store(at + 1, own_queries)
        tl.store(at + 2, own_parts)
        tl.store(at + 3, slot_base)
    for first in range(0, own_items, STEP):
        item = first + tl.arange(0, STEP)
        part = item // tl.maximum(own_tiles, 1)
        tile = item % tl.maximum(own_tiles, 1)
        at = items_ptr + (base + item) * 8
        inside = item < own_items
        tl.store(at, tl.zeros([STEP], tl.int32) + seq, mask=inside)
        tl.store(at + 1, tl.zeros([STEP], tl.int32) + own_start, mask=inside)
        tl.store(at + 2, tl.zeros([STEP], tl.int32) + own_queries, mask=inside)
        tl.store(at + 3, tile, mask=inside)
        tl.store(at + 4, part * step, mask=inside)
        tl.store(at + 5, tl.where(shared, tl.minimum(step, own_leaves - part * step), own_leaves), mask=inside)
        tl.store(at + 6, tl.zeros([STEP], tl.int32) + own_length, mask=inside)
        tl.store(at + 7, tl.where(shared, slot_base + tile * own_parts + part, -1), mask=inside)


def launch(plan: "MlaDecodePlan", seqlens_k: torch.Tensor, cu_seqlens_q: torch.Tensor | None) -> None:
    """Launches over checked arguments."""
    num_seqs = seqlens_k.shape[0]
    if num_seqs == 0:
        return
    with torch.cuda.device_of(seqlens_k):
        list_items[(num_seqs,)](
            plan.items,
            plan.counts,
            plan.shared,
            seqlens_k,
            cu_seqlens_q if cu_seqlens_q is not None else seqlens_k,
            num_seqs,
            plan.programs,
            HEADS=plan.heads,
            LEAF=plan.tree.leaf,
            LEAVES_PER_GROUP=plan.tree.leaves_per_group,
            ROWS=plan.rows,
            MULTI=cu_seqlens_q is not None,
            SEQS=max(triton.next_power_of_2(num_seqs), 16),
            STEP=64,
            num_warps=4,
        )
