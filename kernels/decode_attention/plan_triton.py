"""How many tiles a split of a decode step may hold: a model of how long the step takes, for some limits, by Triton.

Memory serves all programs alike, so a round of one split for each takes as long as their tiles together; but a program
that is left alone needs `least` of its time in company. A split of a pair that is cut takes a program as long as
`cut_tiles` more, and a pair's merge, at the end, as long as `merge_tiles` for each of its splits.

Where programs claim places, splits that are no more than programs begin at once and have a model of their own: a second
split costs a program more than its tiles, as it waits for its first ones again. The constants are fitted to 300 such
steps (H200). Of 14 batches of mixed lengths, 15 or 16 sequences with 8 kv heads, none takes over 3% longer than with
the best of all limits.
"""

import triton
import triton.language as tl


@triton.jit
def splits_of(tiles, most, limit, PER_LEAF: tl.constexpr):
    """Returns how many splits a pair is cut into for about `limit` tiles each, a leaf or more; `most` at most.

    Less than half a leaf above it is no reason for one split more.
    """
    return tl.minimum(tl.cdiv(tl.maximum(tiles - (PER_LEAF // 2 - 1), 1), limit), most)


@triton.jit
def limits_to_try(tiles, busy, programs, HEADS, PER_LEAF: tl.constexpr, LIMITS: tl.constexpr):
    """Returns LIMITS (16 or 32) limits to choose from, of PER_LEAF tiles or more.

    Two are of a leaf (the first makes a split of any rest of one), some cut the longest pair into equal splits, and
    some lie around a program's share of all tiles; those from the 17th on above it, where a program has one split.
    """
    number = tl.arange(0, LIMITS)
    longest = tl.max(tiles, 0)
    pairs = tl.maximum(tl.sum(busy.to(tl.int32), 0) * HEADS, 1)
    share = tl.sum(tl.where(busy, tiles, 0).to(tl.float32), 0) * HEADS / programs
    equal = tl.where(number < 9, number - 1, tl.maximum(programs // pairs, 1) * (number - 8))
    rounds = tl.exp2(tl.where(number < 16, (number - 12).to(tl.float32) * 0.5, (14 - number).to(tl.float32) * 0.1))
    limits = tl.where(number < 11, tl.cdiv(longest, tl.maximum(equal, 1)), tl.ceil(share / rounds).to(tl.int32))
    return tl.where(number > 1, tl.maximum(limits, PER_LEAF), PER_LEAF - 1 + number)


@triton.jit
def largest_split(tiles, splits, busy, PER_LEAF: tl.constexpr):
    """Returns the tiles of each limit's largest split.

    Cuts lie at leaves: what equal splits leave over is one more leaf for some, or the last leaf's rest.
    """
    even = tiles[None, :] // tl.maximum(splits * PER_LEAF, 1) * PER_LEAF
    longest = even + tl.minimum(tiles[None, :] - splits * even, PER_LEAF)
    return tl.max(tl.where(busy[None, :], longest, 0), 1).to(tl.float32)


@triton.jit
def estimates(tiles, splits, busy, programs, costs, HEADS, PER_LEAF: tl.constexpr):
    """Returns how long a step with each limit's splits takes, in tiles of a program among all others."""
    least, cut_tiles, merge_tiles = costs
    total = tl.sum(tl.where(busy, tiles, 0).to(tl.float32), 0) * HEADS
    largest = largest_split(tiles, splits, busy, PER_LEAF)
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
def estimates_at_once(tiles, splits, busy, programs, costs, HEADS, PER_LEAF: tl.constexpr):
    """Returns the same where each split has a program, and all begin at once.

    Memory serves them alike until fewer than `least` of the programs are left; from then on a tile takes `least` of its
    time. Whatever is taken for what each of them has done by then, the step takes no less: the largest of these bounds
    is the estimate.
    """
    least, cut_tiles, uneven, idle, _ = costs
    share = tl.sum(tl.where(busy, tiles, 0).to(tl.float32), 0) * HEADS / programs
    counts = splits.to(tl.float32) * (HEADS / programs)
    sizes = tiles[None, :] / tl.maximum(splits, 1).to(tl.float32)
    largest = largest_split(tiles, splits, busy, PER_LEAF)
    bound = tl.zeros_like(largest) + share
    for eighths in tl.static_range(8):
        done = largest * (eighths / 8)
        served = tl.sum(counts * tl.minimum(sizes, done[:, None]), 1)
        bound = tl.maximum(bound, served + least * (largest - done))
    cut = tl.sum(tl.where(splits > 1, counts, 0.0), 1)
    return share * (1.0 + idle * (1.0 - tl.sum(counts, 1))) + uneven * (bound - share) + cut_tiles * cut


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
):
    """Returns the tiles that a split may hold: those of the shortest step, the longest pair's where none may be cut."""
    limits = limits_to_try(tiles, busy, programs, HEADS, PER_LEAF, 32 if AT_ONCE else 16)
    splits = tl.where(busy[None, :], splits_of(tiles[None, :], most_splits[None, :], limits[:, None], PER_LEAF), 0)
    num_splits = tl.sum(splits, 1) * HEADS
    cost = estimates(tiles, splits, busy, programs, costs, HEADS, PER_LEAF)
    if AT_ONCE:
        at_once = estimates_at_once(tiles, splits, busy, programs, costs_at_once, HEADS, PER_LEAF)
        groups = tl.cdiv(tl.cdiv(tiles, PER_LEAF), LEAVES_PER_GROUP)
        folded = tl.max(tl.where(splits > 1, groups[None, :], 0), 1).to(tl.float32)
        cost = tl.where(num_splits <= programs, at_once, cost) + costs_at_once[4] * folded
    cost = tl.where(num_splits <= most, cost, float("inf"))
    return tl.max(tl.where(cost == tl.min(cost, 0), limits, 1), 0)
