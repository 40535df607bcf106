"""The plan of mla_decode in Triton: one program lists one sequence's items.

Knows only lengths. Whole sequences come first, the longest ahead; then the leaves of those that are shared out.
"""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from kernels.mla_decode.plan import MlaDecodePlan

LEAF = 1024
ROWS = 64


@triton.jit(do_not_specialize=["num_seqs"])
def list_items(
    items_ptr,
    counts_ptr,
    bases_ptr,
    lengths_ptr,
    cu_q_ptr,
    num_seqs,
    programs,
    HEADS: tl.constexpr,
    LEAF: tl.constexpr,
    ROWS: tl.constexpr,
    MULTI: tl.constexpr,
    SEQS: tl.constexpr,
    STEP: tl.constexpr,
):
    seqs = tl.arange(0, SEQS)
    ok = seqs < num_seqs
    length = tl.load(lengths_ptr + seqs, mask=ok, other=0)
    if MULTI:
        q_len = tl.load(cu_q_ptr + seqs + 1, mask=ok, other=0) - tl.load(cu_q_ptr + seqs, mask=ok, other=0)
    else:
        q_len = tl.where(ok, 1, 0)
    tiles = (q_len * HEADS + ROWS - 1) // ROWS
    leaves = tl.maximum((length + LEAF - 1) // LEAF, 1)
    share = (tl.sum(tiles * leaves, 0) + programs - 1) // programs
    # A tile that takes a program hardly longer than its share of the batch needs nobody's help, and no fold.
    whole = leaves <= share + share // 8
    items = tiles * tl.where(whole, 1, leaves)
    slots = tl.where(whole, 0, items)
    key = tl.where(whole, leaves, 0)

    seq = tl.program_id(0)
    mine = seqs == seq
    own_key = tl.sum(tl.where(mine, key, 0), 0)
    own_tiles = tl.sum(tl.where(mine, tiles, 0), 0)
    own_leaves = tl.sum(tl.where(mine, leaves, 0), 0)
    own_items = tl.sum(tl.where(mine, items, 0), 0)
    ahead = (key > own_key) | ((key == own_key) & (seqs < seq))
    base = tl.sum(tl.where(ahead, items, 0), 0)
    slot_base = tl.sum(tl.where(seqs < seq, slots, 0), 0)
    shared = own_key == 0
    tl.store(bases_ptr + seq, tl.where(shared, slot_base, -1))
    if seq == 0:
        tl.store(counts_ptr, tl.sum(items, 0))
    for first in range(0, own_items, STEP):
        item = first + tl.arange(0, STEP)
        leaf = item // tl.maximum(own_tiles, 1)
        tile = item % tl.maximum(own_tiles, 1)
        at = items_ptr + (base + item) * 5
        inside = item < own_items
        tl.store(at, tl.zeros([STEP], tl.int32) + seq, mask=inside)
        tl.store(at + 1, tile, mask=inside)
        tl.store(at + 2, tl.where(shared, leaf, 0), mask=inside)
        tl.store(at + 3, tl.where(shared, 1, own_leaves), mask=inside)
        tl.store(at + 4, tl.where(shared, slot_base + tile * own_leaves + leaf, -1), mask=inside)


def launch(plan: "MlaDecodePlan", seqlens_k: torch.Tensor, cu_seqlens_q: torch.Tensor | None) -> None:
    """Launches over checked arguments."""
    num_seqs = seqlens_k.shape[0]
    if num_seqs == 0:
        return
    with torch.cuda.device_of(seqlens_k):
        list_items[(num_seqs,)](
            plan.items,
            plan.counts,
            plan.bases,
            seqlens_k,
            cu_seqlens_q if cu_seqlens_q is not None else seqlens_k,
            num_seqs,
            plan.programs,
            HEADS=plan.heads,
            LEAF=LEAF,
            ROWS=ROWS,
            MULTI=cu_seqlens_q is not None,
            SEQS=max(triton.next_power_of_2(num_seqs), 16),
            STEP=64,
            num_warps=4,
        )
