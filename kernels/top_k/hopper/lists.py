"""The choice where the bound was a bad guess: what is read once for each bit, and twice more."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.top_k.hopper.lanes import before_warp, lanes_of_tile, ordered, places


@gluon.jit
def load_keys(row_ptr, kept_ptr, at, live, IS_KEPT: gl.constexpr):
    """Returns keys and positions: of a row's logits, or of the words that were kept of it."""
    if IS_KEPT:
        word = gl.load(kept_ptr + at, mask=live, other=0)
        logits = word.to(gl.int32).to(gl.float32, bitcast=True)
        position = (word >> 32).to(gl.int32)
    else:
        logits = gl.load(row_ptr + at, mask=live, other=0.0)
        position = at
    return gl.where(live, ordered(logits), 0), position


@gluon.jit
def count_in_lists(row_ptr, kept_ptr, begin, stop, longest, trial, SLOTS: gl.constexpr, IS_KEPT: gl.constexpr):
    at = begin
    total = at * 0
    for _ in range(0, longest, SLOTS * 32):
        key, _ = load_keys(row_ptr, kept_ptr, at, at < stop, IS_KEPT)
        total += (key >= trial).to(gl.int32)
        at += SLOTS * 32
    return gl.sum(gl.sum(total, 0), 0)


@gluon.jit
def choose_from_lists(row_ptr, kept_ptr, first, size, longest, total, out_ptr, K: gl.constexpr, SLOTS: gl.constexpr,
                      WARPS: gl.constexpr, IS_KEPT: gl.constexpr):  # fmt: skip
    """Writes the positions of the K largest in order. Each warp has a list, `size` from `first` on; `total` in all."""
    warp, lane, slot = lanes_of_tile(SLOTS, WARPS)
    begin = (first + lane)[None, :] + slot * 32
    stop = (first + size)[None, :]
    threshold = gl.to_tensor(0).to(gl.uint32)
    one = gl.to_tensor(1).to(gl.uint32)
    reached = total
    bit = total * 0 + 31
    while (bit >= 0) & (reached != K):
        trial = threshold | (one << bit.to(gl.uint32))
        reaching = count_in_lists(row_ptr, kept_ptr, begin, stop, longest, trial, SLOTS, IS_KEPT)
        threshold = gl.where(reaching >= K, trial, threshold)
        reached = gl.where(reaching >= K, reaching, reached)
        bit -= 1
    threshold = gl.maximum(threshold, one)  # a key of 0 is none
    missing = K - count_in_lists(row_ptr, kept_ptr, begin, stop, longest, threshold + 1, SLOTS, IS_KEPT)
    larger = warp * 0
    equal = warp * 0
    at = begin
    for _ in range(0, longest, SLOTS * 32):
        key, _ = load_keys(row_ptr, kept_ptr, at, at < stop, IS_KEPT)
        larger += places(key > threshold, lane)[1]
        equal += places(key == threshold, lane)[1]
        at += SLOTS * 32
    larger = before_warp(larger, lane, WARPS)[0]
    equal = before_warp(equal, lane, WARPS)[0]
    at = begin
    for _ in range(0, longest, SLOTS * 32):
        key, position = load_keys(row_ptr, kept_ptr, at, at < stop, IS_KEPT)
        is_larger = key > threshold
        is_equal = key == threshold
        larger_place, larger_total = places(is_larger, lane)
        equal_place, equal_total = places(is_equal, lane)
        equal_place += equal[None, :]
        place = larger[None, :] + larger_place + gl.minimum(equal_place, missing)
        gl.store(out_ptr + place, position, mask=is_larger | (is_equal & (equal_place < missing)))
        larger += larger_total
        equal += equal_total
        at += SLOTS * 32


@gluon.jit
def choose_from_row(row_ptr, count, out_ptr, K: gl.constexpr, SLOTS: gl.constexpr, WARPS: gl.constexpr):
    """Writes the positions of the K largest of a row's more than K logits."""
    warp, _, _ = lanes_of_tile(SLOTS, WARPS)
    part = (count + WARPS - 1) // WARPS
    size = gl.minimum(count - gl.minimum(warp * part, count), part)
    choose_from_lists(row_ptr, row_ptr, warp * part, size, part, count, out_ptr, K, SLOTS, WARPS, False)
