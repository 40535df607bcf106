"""The steps of top_k in Gluon: a bound from a sample, what reaches it, and the choice among that."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.top_k.hopper.lanes import (
    before_warp,
    kth_largest,
    lanes_of_tile,
    leading_bit,
    ordered,
    places,
)


@gluon.jit
def sampled_bound(row_ptr, count, K: gl.constexpr, SAFETY: gl.constexpr, LEAST: gl.constexpr, SAMPLE: gl.constexpr,
                  WARPS: gl.constexpr):  # fmt: skip
    """Returns a bound that slightly more than K of a row's logits probably reach; 1 where all may be kept."""
    SLOTS: gl.constexpr = SAMPLE // (32 * WARPS)
    bound = gl.to_tensor(1).to(gl.uint32)
    if count > LEAST:
        warp, lane, slot = lanes_of_tile(SLOTS, WARPS)
        i = (warp * (SLOTS * 32) + lane)[None, :] + slot * 32
        at = (i.to(gl.int64) * count // SAMPLE).to(gl.int32)
        key = ordered(gl.load(row_ptr + at))
        expected = K * SAMPLE / count.to(gl.float32)
        rank = (expected + SAFETY * gl.sqrt(expected) + 1.0).to(gl.int32)
        # Sixteen bits are a bound that is nearly as good.
        zero = gl.to_tensor(0).to(gl.uint32)
        found = kth_largest(key, count * 0 + SAMPLE, rank, zero, count * 0 + 31, 16, WARPS)
        bound = gl.where(found > bound, found, bound)
    return bound


@gluon.jit
def as_float(bound):
    """Returns the fp32 number of a key in the order of numbers."""
    bits = bound.to(gl.int32, bitcast=True)
    return (bits ^ (~(bits >> 31) | -2147483648)).to(gl.float32, bitcast=True)


@gluon.jit
def load_tile(ptr, remaining, slot):
    """Loads slots of 32 from each thread's pointer on, as far as logits remain to it."""
    # A pointer for a thread and constants for its slots: addresses of their own would be half of a loop's instructions.
    return gl.load(ptr[None, :] + slot * 32, mask=slot * 32 < remaining[None, :], other=float("nan"))


@gluon.jit
def reaches_bound(logits, remaining, slot, bound):
    """Whether logits reach a bound; NaN ranks as minus infinity, which all keys up to 0x7FFFFF are reached by."""
    return (logits >= as_float(bound)) | ((bound <= 0x7FFFFF) & (slot * 32 < remaining[None, :]))


@gluon.jit
def packed(logits, position):
    """A logit's bits and its position in one integer."""
    return (logits.to(gl.int32, bitcast=True).to(gl.int64) & 0xFFFFFFFF) | (position.to(gl.int64) << 32)


@gluon.jit
def place_in_span(first, SLOTS: gl.constexpr, WARPS: gl.constexpr):
    """Returns where each thread's slots of a span's first tile begin."""
    warp, lane, _ = lanes_of_tile(SLOTS, WARPS)
    return first + warp * (SLOTS * 32) + lane


@gluon.jit
def load_span(row_ptr, first, stop, SLOTS: gl.constexpr, WARPS: gl.constexpr):
    """Returns the logits of a span's first tile."""
    _, _, slot = lanes_of_tile(SLOTS, WARPS)
    at = place_in_span(first, SLOTS, WARPS)
    return load_tile(row_ptr + at, stop - at, slot)


@gluon.jit
def keep_span(row_ptr, logits, first, stop, bound, kept_ptr, SLOTS: gl.constexpr, WARPS: gl.constexpr):
    """Stores what reaches the bound of the logits from first to stop, in order; returns how many. `logits` are those of
    the first tile."""
    TILE: gl.constexpr = SLOTS * 32 * WARPS
    _, lane, slot = lanes_of_tile(SLOTS, WARPS)
    at = place_in_span(first, SLOTS, WARPS)
    ptr = row_ptr + at
    kept = first * 0
    for _ in range(first, stop, TILE):
        ptr += TILE
        ahead = load_tile(ptr, stop - at - TILE, slot)
        reaches = reaches_bound(logits, stop - at, slot, bound)
        place, total = places(reaches, lane)
        before, reaching = before_warp(total, lane, WARPS)
        word = packed(logits, at[None, :] + slot * 32)
        gl.store(kept_ptr + (place + (before + kept)[None, :]), word, mask=reaches)
        kept += reaching
        at += TILE
        logits = ahead
    return kept


@gluon.jit
def keep_row(row_ptr, count, bound, kept_ptr, counts_ptr, SLOTS: gl.constexpr, WARPS: gl.constexpr):
    """Each warp stores what reaches the bound of its part of a row, where the part's logits begin.

    Returns the logits of a part, and for each thread where its warp's part begins and how many are kept of it.
    """
    TILE: gl.constexpr = SLOTS * 32
    warp, lane, slot = lanes_of_tile(SLOTS, WARPS)
    part = (count + TILE * WARPS - 1) // (TILE * WARPS) * TILE
    begin = warp * part
    at = begin + lane
    stop = gl.minimum(begin + part, count)
    ptr = row_ptr + at
    running = begin
    ahead = load_tile(ptr, stop - at, slot)
    for _ in range(0, part, TILE):
        logits = ahead
        ptr += TILE
        ahead = load_tile(ptr, stop - at - TILE, slot)
        reaches = reaches_bound(logits, stop - at, slot, bound)
        place, total = places(reaches, lane)
        gl.store(kept_ptr + (running[None, :] + place), packed(logits, at[None, :] + slot * 32), mask=reaches)
        running += total
        at += TILE
    gl.store(counts_ptr + warp, running - begin, mask=lane == 0)
    return part, begin, running - begin


@gluon.jit
def keep_held(key, position, total, bound, out_ptr, K: gl.constexpr, SLOTS: gl.constexpr, WARPS: gl.constexpr):
    """Writes the positions of the K largest of a tile of keys in their order; `total` keys reach the bound, others
    are 0."""
    _, lane, _ = lanes_of_tile(SLOTS, WARPS)
    # Counted from the bound on, keys have fewer bits to decide than those in which they differ from it: 1.9 and 2
    # differ from bit 30 on and are 2^20 apart.
    key = gl.where(key >= bound, key - bound + 1, 0)
    bit = gl.maximum(leading_bit(gl.max(gl.max(key, 0), 0)), 0) | 1
    found = kth_largest(key, total, K, gl.to_tensor(0).to(gl.uint32), bit, 0, WARPS)
    threshold = gl.maximum(found, gl.to_tensor(1).to(gl.uint32))  # a key of 0 is none
    is_larger = key > threshold
    is_equal = key == threshold
    larger_place, larger = places(is_larger, lane)
    equal_place, equal = places(is_equal, lane)
    before, both = before_warp(larger + (equal << 16), lane, WARPS)
    missing = K - (both & 65535)
    larger_place += (before & 65535)[None, :]
    equal_place += (before >> 16)[None, :]
    is_kept = is_larger | (is_equal & (equal_place < missing))
    gl.store(out_ptr + (larger_place + gl.minimum(equal_place, missing)), position, mask=is_kept)


@gluon.jit
def keep_largest(kept_ptr, counts_ptr, total, parts, part, bound, out_ptr, K: gl.constexpr, HELD: gl.constexpr,
                 WARPS: gl.constexpr):  # fmt: skip
    """Writes the positions of the K largest of what all parts kept, `total` up to HELD, in their order."""
    SLOTS: gl.constexpr = HELD // (32 * WARPS)
    STEP: gl.constexpr = 8
    warp, lane, slot = lanes_of_tile(SLOTS, WARPS)
    index = (warp * (SLOTS * 32) + lane)[None, :] + slot * 32
    at = index
    end = total * 0
    # Loads of one step do not wait for each other; all at once fill the registers where rows are long.
    for first in range(0, parts, STEP):
        for i in gl.static_range(STEP):
            kept = gl.load(counts_ptr + first + i, mask=first + i < parts, other=0)
            end += kept
            at += gl.where(index >= end, part - kept, 0)
    word = gl.load(kept_ptr + at, mask=index < total, other=0)
    key = gl.where(index < total, ordered(word.to(gl.int32).to(gl.float32, bitcast=True)), 0)
    keep_held(key, (word >> 32).to(gl.int32), total, bound, out_ptr, K, SLOTS, WARPS)
