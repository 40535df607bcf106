"""The plan of mla_decode in Triton: one program lists one sequence's items.

Items come longest first, counted in tiles of TILE latents, and programs draw them in this order: a sequence's last
item may be a small rest, and rests come behind all that is full. What is too long for one program is shared out by
groups of leaves where that keeps the programs as busy as leaves would: fewer partial results to write and to fold.

    items      | 0 ........ | 1 ........ | 2 .. | 3 .. | 4 |      here of two sequences of 2, and one of 1 full item
    programs   | 0          | 1          | 2    | any  | any |
"""

import torch
import triton
import triton.language as tl

from kernels.mla_decode.tree_sizes import SHORT_LEAVES, TILE, Tree


@triton.jit
def leaf_tiles(
    size, LEAF: tl.constexpr, SHORT: tl.constexpr, SHORT_LEAVES: tl.constexpr, TILE: tl.constexpr, EVEN: tl.constexpr
):
    """Returns how many tiles of latents the leaves of sequences of `size` tiles have; leaves.py computes the same."""
    if SHORT == 0:
        return size * 0 + LEAF // TILE
    most = tl.where(size <= SHORT_LEAVES * (SHORT // TILE), SHORT // TILE, LEAF // TILE)
    factor: tl.constexpr = 2 if EVEN else 1
    shift = size * 0 + (factor - 1)
    for _ in tl.static_range(16):
        shift += tl.where((most << shift) < factor * size, 1, 0)
    return ((size + (1 << shift) - 1) >> shift) * factor


@triton.jit
def fits(tiles, size, enough, programs, per_item):
    """Returns whether no program gets more than `enough` tiles of latents if work items have per_item of them each.

    A sequence has `tiles` tiles of rows and `size` tiles of latents. Full items count as rounds of the longest, one for
    each program; a sequence's shorter last item goes to a program that is idle in the last round, else on top.
    """
    fulls = tl.sum(tiles * (size // per_item), 0)
    rest = tl.where(tiles > 0, size % per_item, 0)
    rests = tl.sum(tl.where(rest > 0, tiles, 0), 0)
    rounds = tl.cdiv(fulls, programs)
    on_top = tl.cdiv(tl.maximum(rests - (rounds * programs - fulls), 0), programs)
    longest = tl.max(tl.where(tiles > 0, per_item, 0), 0)
    return rounds * longest + on_top * tl.max(rest, 0) <= enough


@triton.jit
def step_of(tiles, size, enough, programs, per_leaf, LEAVES_PER_GROUP: tl.constexpr, BY_TWOS: tl.constexpr):
    """Returns how many leaves a work item has: LEAVES_PER_GROUP if that `fits`, else 1.

    BY_TWOS: the most of LEAVES_PER_GROUP, its half and its quarter that fits, else 1.
    """
    step = tl.where(fits(tiles, size, enough, programs, per_leaf * LEAVES_PER_GROUP), LEAVES_PER_GROUP, 1)
    if BY_TWOS:
        HALF: tl.constexpr = LEAVES_PER_GROUP // 2
        QUARTER: tl.constexpr = LEAVES_PER_GROUP // 4
        half, quarter = (
            fits(tiles, size, enough, programs, per_leaf * HALF),
            fits(tiles, size, enough, programs, per_leaf * QUARTER),
        )
        fewer = tl.where(half, HALF, tl.where(quarter, QUARTER, 1))
        step = tl.where(step == 1, fewer, step)
    return step


@triton.jit
def longer(full, rest, parts, tiles, size, fulls_first, rests_first):
    """Returns how many items of each sequence come before those of `size`; of equal ones fulls or rests may."""
    fulls = (full > size) | ((full == size) & fulls_first)
    rests = (rest > size) | ((rest == size) & rests_first)
    return tiles * (tl.where(fulls, parts - 1, 0) + tl.where(rests, 1, 0))


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
    SHORT: tl.constexpr,
    SHORT_LEAVES: tl.constexpr,
    TILE: tl.constexpr,
    LEAVES_PER_GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    MULTI: tl.constexpr,
    BY_LEAF: tl.constexpr,
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
    size = tl.maximum((length + TILE - 1) // TILE, 1)
    per_leaf = leaf_tiles(size, LEAF, SHORT, SHORT_LEAVES, TILE, ROWS == 64)
    leaves = (size + per_leaf - 1) // per_leaf
    share = (tl.sum(tiles * size, 0) + programs - 1) // programs
    # A tile of rows that takes a program hardly longer than its share of the batch is not split, and needs no fold.
    enough = share + share // 8
    whole = leaves == 1
    if not BY_LEAF:
        whole |= size <= enough
    step = step_of(
        tl.where(whole, 0, tiles), size, share + share // 6, programs, per_leaf, LEAVES_PER_GROUP, ROWS == 64
    )
    if BY_LEAF:
        step = 1
    parts = tl.where(whole, 1, (leaves + step - 1) // step)
    items = tiles * parts
    slots = tl.where(whole, 0, items)
    full = tl.where(whole, size, step * per_leaf)
    rest = size - (parts - 1) * full

    seq = tl.program_id(0)
    mine = seqs == seq
    own_full = tl.sum(tl.where(mine, full, 0), 0)
    own_rest = tl.sum(tl.where(mine, rest, 0), 0)
    own_tiles = tl.sum(tl.where(mine, tiles, 0), 0)
    own_leaves = tl.sum(tl.where(mine, leaves, 0), 0)
    own_length = tl.sum(tl.where(mine, length, 0), 0)
    own_start = tl.sum(tl.where(mine, q_start, 0), 0)
    own_queries = tl.sum(tl.where(mine, q_len, 0), 0)
    own_parts = tl.sum(tl.where(mine, parts, 0), 0)
    own_items = own_tiles * own_parts
    base = tl.sum(longer(full, rest, parts, tiles, own_full, seqs < seq, seqs < seq), 0)
    # Its own full items are before a sequence's rests.
    rest_base = tl.sum(longer(full, rest, parts, tiles, own_rest, seqs <= seq, seqs < seq), 0)
    slot_base = tl.sum(tl.where(seqs < seq, slots, 0), 0)
    shared = tl.sum(tl.where(mine, slots, 0), 0) > 0
    if seq == 0:
        tl.store(counts_ptr, tl.sum(items, 0))
        tl.store(counts_ptr + 1, step)
        tl.store(counts_ptr + 2, tl.sum((slots > 0).to(tl.int32), 0))
        tl.store(counts_ptr + 3, tl.max(tl.where(ok, per_leaf, 0), 0))
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
        is_rest = part == own_parts - 1
        at = items_ptr + tl.where(is_rest, rest_base + tile, base + item) * 8
        inside = item < own_items
        tl.store(at, tl.zeros([STEP], tl.int32) + seq, mask=inside)
        tl.store(at + 1, tl.zeros([STEP], tl.int32) + own_start, mask=inside)
        tl.store(at + 2, tl.zeros([STEP], tl.int32) + own_queries, mask=inside)
        tl.store(at + 3, tile, mask=inside)
        tl.store(at + 4, part * step, mask=inside)
        tl.store(at + 5, tl.where(shared, tl.minimum(step, own_leaves - part * step), own_leaves), mask=inside)
        tl.store(at + 6, tl.zeros([STEP], tl.int32) + own_length, mask=inside)
        tl.store(at + 7, tl.where(shared, slot_base + tile * own_parts + part, -1), mask=inside)


def launch(
    lists: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    seqlens_k: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    *,
    programs: int,
    heads: int,
    rows: int,
    tree: Tree,
    by_leaf: bool,
) -> None:
    """Launches over checked arguments. `lists` are the plan's items, counts and shared, which it fills.

    With by_leaf each item is one leaf.
    """
    num_seqs = seqlens_k.shape[0]
    if num_seqs == 0:
        return
    with torch.cuda.device_of(seqlens_k):
        list_items[(num_seqs,)](
            *lists,
            seqlens_k,
            cu_seqlens_q if cu_seqlens_q is not None else seqlens_k,
            num_seqs,
            programs,
            HEADS=heads,
            LEAF=tree.leaf,
            SHORT=tree.short or 0,
            SHORT_LEAVES=SHORT_LEAVES,
            TILE=TILE,
            LEAVES_PER_GROUP=tree.leaves_per_group,
            ROWS=rows,
            MULTI=cu_seqlens_q is not None,
            BY_LEAF=by_leaf,
            SEQS=max(triton.next_power_of_2(num_seqs), 16),
            STEP=64,
            num_warps=4,
        )
