"""How many tiles a split of a decode step may hold: a model of how long the step takes, for some limits, by Triton.

Memory serves all programs alike, so a round of one split for each takes as long as their tiles together; but a program
that runs alone takes `least` times what it takes beside others. A split of a pair that is cut takes a program as long
as `cut_tiles` more, and a pair's merge, at the end, as long as `merge_tiles` for each of its splits.

Where programs claim places, splits that are no more than programs begin at once and have a model of their own: a second
split costs a program more than its tiles, as it waits for its first ones again. The constants are fitted to 300 such
steps (H200). Of 14 batches of mixed lengths, 15 or 16 sequences with 8 kv heads, none takes over 3% longer than with
the best of all limits.
"""

import triton
import triton.language as tl


@triton.jit
def splits_of(tiles, most, limit, spacing):
    """Returns how many splits a pair is cut into for about `limit` tiles each; `most` at most.

    Less than half the tiles between two cuts above it are no reason for one split more.
    """
    return tl.minimum(tl.cdiv(tl.maximum(tiles - (spacing // 2 - 1), 1), limit), most)


@triton.jit
def spacing_of(limit, PER_LEAF: tl.constexpr, LEAVES_PER_GROUP: tl.constexpr, BY_GROUP: tl.constexpr):
    """Returns the tiles between two places where a pair may be cut: groups if the limit is a number of them, or leaves.

    Cuts at groups leave no leaf alone, so that there is less to merge.
    """
    spacing = tl.zeros_like(limit) + PER_LEAF
    if BY_GROUP:
        spacing = tl.where(limit % (PER_LEAF * LEAVES_PER_GROUP) == 0, PER_LEAF * LEAVES_PER_GROUP, spacing)
    return spacing


@triton.jit
def limits_to_try(
    tiles, busy, programs, HEADS, PER_LEAF: tl.constexpr, LEAVES_PER_GROUP: tl.constexpr, LIMITS: tl.constexpr
):
    """Returns LIMITS (16 or 32) limits to choose from, of PER_LEAF tiles or more.

    Two are of a leaf (the first makes a split of any rest of one), some cut the longest pair into equal splits, and
    some lie around a program's share of all tiles; those from the 17th on above it, where a program has one split. The
    last four are numbers of groups.
    """
    number = tl.arange(0, LIMITS)
    longest = tl.max(tiles, 0)
    pairs = tl.maximum(tl.sum(busy.to(tl.int32), 0) * HEADS, 1)
    share = tl.sum(tl.where(busy, tiles, 0).to(tl.float32), 0) * HEADS / programs
    equal = tl.where(number < 9, number - 1, tl.maximum(programs // pairs, 1) * (number - 8))
    of_groups = number >= 28
    step = tl.where(number < 16, (number - 12) * 5, tl.where(of_groups, (28 - number) * 4, 14 - number))
    rounds = tl.exp2(step.to(tl.float32) * 0.1)
    limits = tl.where(number < 11, tl.cdiv(longest, tl.maximum(equal, 1)), tl.ceil(share / rounds).to(tl.int32))
    group = PER_LEAF * LEAVES_PER_GROUP
    limits = tl.where(of_groups, tl.cdiv(limits, group) * group, limits)
    return tl.where(number > 1, tl.maximum(limits, PER_LEAF), PER_LEAF - 1 + number)


@triton.jit
def largest_split(tiles, splits, busy, limits, spacing, PER_LEAF: tl.constexpr):
    """Returns the tiles of each limit's largest split.

    Cut at leaves, what equal splits leave over is one more leaf for some, or the last leaf's rest. Cut at groups, all
    are of as many tiles as the limit but the last one.
    """
    tiles, limits = tiles[None, :], limits[:, None]
    even = tiles // tl.maximum(splits * PER_LEAF, 1) * PER_LEAF
    at_leaf = even + tl.minimum(tiles - splits * even, PER_LEAF)
    last = tiles - (splits - 1) * limits
    at_group = tl.where(splits > 1, tl.maximum(limits, last), last)
    longest = tl.where(spacing[:, None] > PER_LEAF, at_group, at_leaf)
    return tl.max(tl.where(busy[None, :], longest, 0), 1).to(tl.float32)


@triton.jit
def estimates(tiles, splits, largest, busy, programs, costs, HEADS):
    """Returns how long a step with each limit's splits takes, in tiles of a program among all others."""
    least, cut_tiles, merge_tiles = costs
    total = tl.sum(tl.where(busy, tiles, 0).to(tl.float32), 0) * HEADS
    num_splits = tl.sum(splits.to(tl.float32), 1) * HEADS
    cut = tl.sum(tl.where(splits > 1, splits, 0).to(tl.float32), 1) * HEADS
    mean = total / tl.maximum(num_splits, 1.0)
    full_rounds = tl.floor(num_splits / programs)
    rest = num_splits / programs - full_rounds
    # What is drawn last is not spread evenly over the multiprocessors, as first splits are.
    rounds = full_rounds + tl.where(
        rest > 0.0, tl.maximum(tl.where(full_rounds > 0, 0.3 + 0.7 * rest, rest), least), 0.0
    )
    merged = tl.max(tl.where(splits > 1, splits, 0), 1).to(tl.float32)
    # The longest come first: the more splits a program draws, the less it matters how long one is.
    uneven = least * (largest - mean) / tl.maximum(num_splits / programs, 1.0)
    return mean * rounds + uneven + cut_tiles * cut / programs + merge_tiles * merged


@triton.jit
def estimates_at_once(tiles, splits, largest, busy, programs, costs, HEADS):
    """Returns the same where each split has a program, and all begin at once.

    Memory serves them alike until fewer than `least` of the programs are left; from then on a tile takes `least` of its
    time. Whatever is taken for what each of them has done by then, the step takes no less: the largest of these bounds
    counts. One more is for equal splits on some multiprocessors that have one and some that have two: most where three
    quarters of the programs have one.
    """
    least, cut_tiles, uneven, idle, shared, _ = costs
    share = tl.sum(tl.where(busy, tiles, 0).to(tl.float32), 0) * HEADS / programs
    counts = splits.to(tl.float32) * (HEADS / programs)
    sizes = tiles[None, :] / tl.maximum(splits, 1).to(tl.float32)
    bound = tl.zeros_like(largest) + share
    for eighths in tl.static_range(8):
        done = largest * (eighths / 8)
        served = tl.sum(counts * tl.minimum(sizes, done[:, None]), 1)
        bound = tl.maximum(bound, served + least * (largest - done))
    filled = tl.sum(counts, 1)
    from_most = (filled - 0.74) / 0.24
    bound = tl.maximum(bound, share * (1.0 + shared * tl.maximum(1.0 - from_most * from_most, 0.0)))
    cut = tl.sum(tl.where(splits > 1, counts, 0.0), 1)
    # Whole pairs leave nothing to merge at the end, so few programs are as fast.
    slower = tl.where(cut > 0.0, idle * (1.0 - filled), 0.0)
    return share * (1.0 + slower) + uneven * (bound - share) + cut_tiles * cut


@triton.jit
def split_limit(
    tiles,
    most_splits,
    busy,
    programs,
    most,
    costs,
    costs_at_once,
    HEADS,
    PER_LEAF: tl.constexpr,
    LEAVES_PER_GROUP: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BY_GROUP: tl.constexpr,
):
    """Returns the tiles that a split may hold: those of the shortest step, the longest pair's where none may be cut."""
    limits = limits_to_try(tiles, busy, programs, HEADS, PER_LEAF, LEAVES_PER_GROUP, 32 if AT_ONCE else 16)
    spacing = spacing_of(limits, PER_LEAF, LEAVES_PER_GROUP, BY_GROUP)
    splits = splits_of(tiles[None, :], most_splits[None, :], limits[:, None], spacing[:, None])
    splits = tl.where(busy[None, :], splits, 0)
    num_splits = tl.sum(splits, 1) * HEADS
    largest = largest_split(tiles, splits, busy, limits, spacing, PER_LEAF)
    cost = estimates(tiles, splits, largest, busy, programs, costs, HEADS)
    if AT_ONCE:
        at_once = estimates_at_once(tiles, splits, largest, busy, programs, costs_at_once, HEADS)
        groups = tl.cdiv(tl.max(tl.where(busy, tiles, 0), 0), PER_LEAF * LEAVES_PER_GROUP).to(tl.float32)
        # Behind a cut within a group one or two leaves are alone, and folded by themselves.
        folded = tl.where(tl.max(splits, 1) > 1, tl.where(spacing > PER_LEAF, 0.55 * groups, groups), 0.0)
        cost = tl.where(num_splits <= programs, at_once, cost) + costs_at_once[5] * folded
    cost = tl.where(num_splits <= most, cost, float("inf"))
    return tl.max(tl.where(cost == tl.min(cost, 0), limits, 1), 0)
