"""top_k in Triton: one program for one row. First the k-th largest logit, three of its bits a pass; then one more pass
that writes what is larger, and of its equals the first ones.

A pass counts the logits that agree in all higher bits, by the three that follow. Each lane has its eight counts in one
integer of 64 bits, and they are added up when the pass is over: no histogram, so no atomics.
"""

import torch
import triton
import triton.language as tl

from kernels.top_k import MAX_COLUMNS

LANES = 4096
assert 255 * LANES == MAX_COLUMNS


@triton.jit
def ordered(logits):
    """uint32 in the order of fp32 numbers."""
    plain = tl.where(logits == logits, logits, float("-inf")) + 0.0
    bits = plain.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit
def counted(row_ptr, count, prefix, SHIFT: tl.constexpr, LANES: tl.constexpr):
    """Of the keys that begin with `prefix` above bit SHIFT + 3: eight counts in each lane, by the three bits there."""
    lane = tl.arange(0, LANES)
    counts = tl.zeros([LANES], tl.int64)
    for start in tl.range(0, count, LANES):
        live = start + lane < count
        key = ordered(tl.load(row_ptr + start + lane, mask=live, other=0.0))
        if SHIFT < 29:
            live = live & (key >> (SHIFT + 3) == prefix)
        counts += tl.where(live, tl.full([LANES], 1, tl.int64) << (((key >> SHIFT) & 7) * 8).to(tl.int64), 0)
    return counts


@triton.jit(do_not_specialize=["stride_row"])
def choose(logits_ptr, num_keys_ptr, out_ptr, stride_row, K: tl.constexpr, LANES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride_row
    out_row = out_ptr + row * K
    count = tl.load(num_keys_ptr + row)
    lane = tl.arange(0, LANES)
    has_choice = count > K
    # Without a choice every key is at least the threshold.
    threshold = tl.full([], 0, tl.uint32)
    missing = count
    if has_choice:
        missing = tl.full([], K, tl.int32)
        for step in tl.static_range(11):
            counts = counted(row_ptr, count, threshold, 30 - 3 * step, LANES)
            digit = tl.full([], 0, tl.int32)
            larger = tl.full([], 0, tl.int32)
            for place in tl.static_range(7):
                # How many have more than 6 - place there: while they are too few, the digit is lower.
                reached = tl.sum(((counts >> (8 * (7 - place))) & 255).to(tl.int32), 0)
                is_open = (digit == 0) & (larger + reached < missing)
                digit = tl.where((digit == 0) & (larger + reached >= missing), 7 - place, digit)
                larger = tl.where(is_open, larger + reached, larger)
            missing -= larger
            threshold = (threshold << 3) + digit.to(tl.uint32)
    taken = tl.full([], 0, tl.int32)
    for start in tl.range(0, count, LANES):
        position = start + lane
        live = position < count
        key = ordered(tl.load(row_ptr + position, mask=live & has_choice, other=0.0))
        equal = (live & (key == threshold)).to(tl.int32)
        is_first = tl.cumsum(equal, 0) <= missing
        is_chosen = live & ((key > threshold) | ((equal == 1) & is_first))
        place = taken + tl.cumsum(is_chosen.to(tl.int32), 0) - 1
        tl.store(out_row + place, position, mask=is_chosen)
        taken += tl.sum(is_chosen.to(tl.int32), 0)
        missing -= tl.minimum(tl.sum(equal, 0), missing)
    for start in tl.range(taken, K, LANES):
        tl.store(out_row + start + lane, -1, mask=start + lane < K)


def launch(logits: torch.Tensor, num_keys: torch.Tensor, out: torch.Tensor) -> None:
    """Fills out; checked, non-empty arguments."""
    with torch.cuda.device_of(logits):
        choose[(logits.shape[0],)](
            logits, num_keys, out, logits.stride(0), K=out.shape[1], LANES=LANES, num_warps=16
        )  # fmt: skip
