"""Into how many splits a decode step is cut, and where: lengths in, splits out, in device memory, by Triton.

A plan of all keys holds for every layer of a step, windowed or not. One for a window divides the PLANNED newest keys of
each sequence, from its origin on: the leaf in which they begin. What is said of a pair below is said of that rest.

A pair is one sequence and one kv head; its keys are tiles of TILE, its tiles leaves of PER_LEAF. A split is a whole
pair, or one of the equal runs of leaves into which a pair is cut. How many splits a sequence's pairs have follows from
one number for the batch: the tiles that a split may hold. Several are tried, and the one taken whose step a model of
the card says is the shortest (plan_triton.py). Programs draw splits, the longest first, until there are none. Where
they claim places and the number is one of groups, runs are of groups: a cut within a group makes more to merge.

    tiles of a pair     | 33            | 9   | 70                                |      here with up to 35 a split
    splits              | 0             | 1   | 2                | 3              |

Where programs draw many whole pairs of about one length, the last ones drawn are cut into small splits: without them
some programs have a pair more than others. 256 sequences of 33,000 keys and 8 kv heads, 7.8 pairs for each of 264
programs, take 7,542 us instead of 7,644 (H200); 64 sequences, 1.9 pairs, would take 511 for 492 at 8,193 keys.
"""

import torch
import triton
import triton.language as tl

from kernels.decode_attention.plan_triton import spacing_of, split_limit, splits_of

BLOCK_ELEMENTS = 8192
# From this number of pairs for each program on, one in TAIL_SHARE is cut into TAIL_SPLITS.
TAIL_ROUNDS, TAIL_SHARE, TAIL_SPLITS = 7, 8, 4
# The fewest leaves of such pairs.
TAIL_LEAVES = 16


@triton.jit
def pair_of(length, PLANNED: tl.constexpr, TILE: tl.constexpr, PER_LEAF: tl.constexpr):
    """Returns (origin, tiles from there on, the most splits) of a sequence's pairs.

    The most are as many as the planned keys fill leaves. The first leaf may hold one of them behind many other keys.
    """
    all_tiles = tl.maximum(tl.cdiv(length, TILE), 1)
    before = tl.zeros_like(length)
    if PLANNED > 0:
        before = tl.maximum(length - PLANNED, 0) // TILE
    origin = before // PER_LEAF
    return origin, all_tiles - origin * PER_LEAF, tl.cdiv(all_tiles - before, PER_LEAF)


@triton.jit
def split_start(split, splits, tiles, leaves, spacing, PER_LEAF: tl.constexpr):
    """Returns the first leaf of a split, from the origin on: the one that begins nearest to its share of the tiles.

    Where cuts are a group apart or more, splits are of as many groups each, but for the last one.
    """
    share = tl.cdiv(tl.maximum(tiles - (spacing // 2 - 1), 1), splits * spacing)
    divided = tl.maximum(tiles, splits * PER_LEAF)
    at_leaf = (split * divided + splits * (PER_LEAF // 2)) // (splits * PER_LEAF)
    start = tl.where(spacing > PER_LEAF, split * share * (spacing // PER_LEAF), at_leaf)
    return tl.where(split < splits, start, leaves)


@triton.jit
def sizes_of(splits, tiles, spacing, PER_LEAF: tl.constexpr):
    """Returns (tiles of a pair's small splits, how many before the last have a leaf more, tiles of the last one)."""
    some = tl.maximum(splits, 1)
    before_last = split_start(some - 1, some, tiles, 0, spacing, PER_LEAF)
    at_group = spacing > PER_LEAF
    small = tl.maximum(tl.where(at_group, before_last // tl.maximum(some - 1, 1), tiles // (some * PER_LEAF)), 1)
    more = tl.where(at_group, 0, before_last - (some - 1) * small)
    return small * PER_LEAF, more, tiles - before_last * PER_LEAF


@triton.jit
def count_sizes(size, splits, sizes, PER_LEAF: tl.constexpr):
    """Returns how many of a pair's splits are larger than `size`, and how many are of this size."""
    small, more, last = sizes
    less = splits - 1 - more
    larger = tl.where(small + PER_LEAF > size, more, 0) + tl.where(small > size, less, 0) + (last > size).to(tl.int32)
    equal = tl.where(small + PER_LEAF == size, more, 0) + tl.where(small == size, less, 0) + (last == size).to(tl.int32)
    return tl.where(splits > 0, larger, 0), tl.where(splits > 0, equal, 0)


@triton.jit
def with_tail(
    splits,
    tiles,
    most_splits,
    busy,
    programs,
    most,
    HEADS,
    PER_LEAF: tl.constexpr,
    ROUNDS: tl.constexpr,
    SHARE: tl.constexpr,
    SPLITS: tl.constexpr,
    LEAVES: tl.constexpr,
):
    """Returns the splits of each sequence's pairs, more for the last ones: sequences come longest first.

    More only where none is cut, the shortest is half as long as the longest or more, and there is room.
    """
    longest = tl.max(tl.where(busy, tiles, 0), 0)
    shortest = tl.min(tl.where(busy, tiles, longest), 0)
    num_busy = tl.sum(busy.to(tl.int32), 0)
    tail = num_busy // SHARE
    is_last = busy & (tl.arange(0, splits.shape[0]) >= num_busy - tail)
    cut = splits_of(tiles, most_splits, tl.maximum(tl.cdiv(longest, SPLITS), PER_LEAF), PER_LEAF)
    is_whole = tl.max(tl.where(busy, splits, 1), 0) == 1
    is_even = (2 * shortest >= longest) & (shortest >= LEAVES * PER_LEAF)
    has_room = (num_busy + tail * (SPLITS - 1)) * HEADS <= most
    wanted = is_whole & is_even & has_room & (num_busy * HEADS >= ROUNDS * programs)
    return tl.where(is_last & wanted, cut, splits)


# What changes from batch to batch is not specialised on: a new value must not mean a new compilation.
@triton.jit(do_not_specialize=["num_seqs"])
def plan_splits(
    seqlens_ptr,
    splits_ptr,
    num_seqs,
    programs,
    max_splits,
    least,
    cut_tiles,
    merge_tiles,
    least_at_once,
    cut_at_once,
    uneven,
    idle,
    shared,
    fold_tiles,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    PER_LEAF: tl.constexpr,
    LEAVES_PER_GROUP: tl.constexpr,
    PLANNED: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    SPLIT_FIELDS: tl.constexpr,
    TAIL_ROUNDS: tl.constexpr,
    TAIL_SHARE: tl.constexpr,
    TAIL_SPLITS: tl.constexpr,
    TAIL_LEAVES: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Every program of the plan sums over all sequences and writes its own slice of the splits."""
    place = tl.arange(0, BLOCK_SEQS)
    real = place < num_seqs
    length = tl.load(seqlens_ptr + place, mask=real, other=0)
    _, tiles, most_splits = pair_of(length, PLANNED, TILE, PER_LEAF)
    empty = num_seqs - tl.sum((length > 0).to(tl.int32), 0)
    most = max_splits - empty * HEADS
    costs = (least, cut_tiles, merge_tiles)
    costs_at_once = (least_at_once, cut_at_once, uneven, idle, shared, fold_tiles)
    # A window's keys may begin within a group.
    BY_GROUP: tl.constexpr = AT_ONCE and PLANNED == 0
    limit = split_limit(
        tiles, most_splits, length > 0, programs, most, costs, costs_at_once, HEADS, PER_LEAF, LEAVES_PER_GROUP,
        AT_ONCE, BY_GROUP,
    )  # fmt: skip
    spacing = spacing_of(limit, PER_LEAF, LEAVES_PER_GROUP, BY_GROUP)
    # Sequences of the longest splits first, for with_tail. Beyond what a sort has bits for they count as equal.
    average = tl.cdiv(tiles, splits_of(tiles, most_splits, limit, spacing))
    average_tiles = tl.where(real, tl.minimum(average, 1 << 18), 0)
    seq = tl.sort(((1 << 18) - average_tiles) * BLOCK_SEQS + place) % BLOCK_SEQS
    length = tl.load(seqlens_ptr + seq, mask=real, other=0)
    origin, tiles, most_splits = pair_of(length, PLANNED, TILE, PER_LEAF)
    groups = tl.cdiv(origin + tl.cdiv(tiles, PER_LEAF), LEAVES_PER_GROUP) - origin // LEAVES_PER_GROUP
    splits = splits_of(tiles, most_splits, limit, spacing)
    splits = with_tail(
        splits, tiles, most_splits, real & (length > 0), programs, most, HEADS, PER_LEAF, TAIL_ROUNDS, TAIL_SHARE,
        TAIL_SPLITS, TAIL_LEAVES,
    )  # fmt: skip
    splits = tl.where(real, splits, 0)
    # Partials of a pair: one for each group, and what may be left alone behind each cut.
    spare = LEAVES_PER_GROUP - 1
    partials = tl.where(splits > 1, groups + spare * (splits - 1), 0)
    base = tl.cumsum(splits, 0) - splits
    partials_base = tl.cumsum(partials, 0) - partials

    split = tl.program_id(0) * BLOCK_SPLITS + tl.arange(0, BLOCK_SPLITS)
    before = ((base * HEADS)[None, :] <= split[:, None]) & real[None, :]
    owner = tl.maximum(tl.sum(before.to(tl.int32), 1) - 1, 0)
    own = place[None, :] == owner[:, None]
    own_splits = tl.maximum(tl.sum(tl.where(own, splits[None, :], 0), 1), 1)
    own_length = tl.sum(tl.where(own, length[None, :], 0), 1)
    own_origin, own_tiles, _ = pair_of(own_length, PLANNED, TILE, PER_LEAF)
    own_leaves = tl.cdiv(own_tiles, PER_LEAF)
    own_partials = tl.sum(tl.where(own, partials[None, :], 0), 1)
    first = tl.sum(tl.where(own, partials_base[None, :], 0), 1) * HEADS
    offset = split - tl.sum(tl.where(own, base[None, :], 0), 1) * HEADS
    head = offset // own_splits % HEADS
    nth = offset % own_splits
    start = split_start(nth, own_splits, own_tiles, own_leaves, spacing, PER_LEAF)
    stop = split_start(nth + 1, own_splits, own_tiles, own_leaves, spacing, PER_LEAF)
    total = tl.sum(splits, 0) * HEADS
    # The largest come first: what is drawn last then keeps no program long behind the others.
    small, _, last = sizes_of(own_splits, own_tiles, spacing, PER_LEAF)
    size = tl.where(nth == own_splits - 1, last, (stop - start) * PER_LEAF)
    sizes = sizes_of(splits, tiles, spacing, PER_LEAF)
    sizes = (sizes[0][None, :], sizes[1][None, :], sizes[2][None, :])
    larger, equal = count_sizes(size[:, None], splits[None, :], sizes, PER_LEAF)
    more_before = start - nth * (small // PER_LEAF)
    equal_before = tl.where(size == small + PER_LEAF, more_before, tl.where(size == small, nth - more_before, 0))
    rank = (tl.sum(larger, 1) + tl.sum(tl.where(place[None, :] < owner[:, None], equal, 0), 1)) * HEADS
    rank += head * tl.sum(tl.where(own, equal, 0), 1) + equal_before
    at = splits_ptr + tl.where(split < total, rank, split) * SPLIT_FIELDS
    ok = split < max_splits
    tl.store(at, tl.sum(tl.where(own, seq[None, :], 0), 1), mask=ok)
    tl.store(at + 1, head, mask=ok)
    tl.store(at + 2, own_origin + start, mask=ok)
    tl.store(at + 3, tl.where(split < total, stop - start, 0), mask=ok)
    tl.store(at + 4, own_length, mask=ok)
    tl.store(at + 5, tl.where((spacing > PER_LEAF) & (own_splits > 1), -own_splits, own_splits), mask=ok)
    # A group's partial is numbered by the group, from the sequence's beginning on.
    tl.store(at + 6, first + head * own_partials - own_origin // LEAVES_PER_GROUP, mask=ok)
    tl.store(at + 7, total + tl.zeros_like(split), mask=ok)


def sizes_of_program(block_seqs: int, at_once: bool) -> tuple[int, int]:
    """Returns the splits that a program of the plan writes and its warps, so that it spills nothing."""
    elements = BLOCK_ELEMENTS // 4 if at_once else BLOCK_ELEMENTS
    return max(1, min(64, elements // block_seqs)), 4 if block_seqs <= 32 else 8


def launch(
    seqlens_k: torch.Tensor,
    splits: torch.Tensor,
    *,
    kv_heads: int,
    programs: int,
    tile: int,
    leaf: int,
    leaves_per_group: int,
    costs: tuple[float, float, float],
    planned_tokens: int = 0,
    costs_at_once: tuple[float, ...] | None = None,
) -> None:
    """Launches over at least one sequence; `splits` [max_splits, fields] int32 has the room.

    `costs` are the model's least, cut_tiles and merge_tiles. `costs_at_once` are its least, cut_tiles, uneven, idle,
    shared and fold_tiles where each split has a program (None: as with fewer programs). planned_tokens of a sequence's
    newest keys are divided (0: all).
    """
    num_seqs, max_splits = seqlens_k.shape[0], splits.shape[0]
    block_seqs = max(16, triton.next_power_of_2(num_seqs))
    block_splits, num_warps = sizes_of_program(block_seqs, costs_at_once is not None)
    with torch.cuda.device_of(seqlens_k):
        plan_splits[(triton.cdiv(max_splits, block_splits),)](
            seqlens_k,
            splits,
            num_seqs,
            programs,
            max_splits,
            *costs,
            *(costs_at_once or (0.0,) * 6),
            HEADS=kv_heads,
            TILE=tile,
            PER_LEAF=leaf // tile,
            LEAVES_PER_GROUP=leaves_per_group,
            PLANNED=planned_tokens,
            BLOCK_SEQS=block_seqs,
            BLOCK_SPLITS=block_splits,
            SPLIT_FIELDS=splits.shape[1],
            TAIL_ROUNDS=TAIL_ROUNDS,
            TAIL_SHARE=TAIL_SHARE,
            TAIL_SPLITS=TAIL_SPLITS,
            TAIL_LEAVES=TAIL_LEAVES,
            AT_ONCE=costs_at_once is not None,
            num_warps=num_warps,
        )
