"""top_k in Triton: one program for a row's next CHUNK logits keeps its k largest; what all of them keep is narrowed
again, until one program has a whole row.

A program holds its logits in registers, as integers of the same order, and finds the k-th largest bit by bit: a count
for each bit, and none once exactly k are left. No histogram, so no atomics. Equals are kept in the order of their
positions, so that what is kept does not depend on the chunks.
"""

import torch
import triton
import triton.language as tl

from kernels.errors import KernelArgumentError

CHUNK = 8192
# More than a GPU runs at once.
MANY_PROGRAMS = 256
MAX_K = CHUNK // 2


@triton.jit
def ordered(logits):
    """uint32 in the order of fp32 numbers, none of them 0."""
    plain = tl.where(logits == logits, logits, float("-inf")) + 0.0
    bits = plain.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit
def kth_largest(key, valid, K: tl.constexpr):
    """Returns the largest number, of those with few bits first, that at least K of the keys reach; 1 where there is no
    choice."""
    threshold = tl.full([], 1, tl.uint32)
    if valid > K:
        threshold = tl.full([], 0, tl.uint32)
        reached = valid
        bit = tl.full([], 31, tl.int32)
        while (bit >= 0) & (reached != K):
            trial = threshold | (tl.full([], 1, tl.uint32) << bit.to(tl.uint32))
            count = tl.sum((key >= trial).to(tl.int32), 0)
            is_reached = count >= K
            threshold = tl.where(is_reached, trial, threshold)
            reached = tl.where(is_reached, count, reached)
            bit -= 1
    return threshold


# What changes from batch to batch is not specialised on: a new value, or rows that begin elsewhere, must not mean a new
# compilation.
@triton.jit(do_not_specialize=["width", "stride_row", "stride_out"], do_not_specialize_on_alignment=["num_keys_ptr"])
def narrow(
    logits_ptr, keys_ptr, positions_ptr, num_keys_ptr, out_keys_ptr, out_ptr, width, stride_row, stride_out,
    K: tl.constexpr, CHUNK: tl.constexpr, IS_FIRST: tl.constexpr, IS_LAST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    if IS_FIRST:
        live = at < tl.load(num_keys_ptr + row)
        key = tl.where(live, ordered(tl.load(logits_ptr + row * stride_row + at, mask=live, other=0.0)), 0)
        position = at
    else:
        live = at < width
        key = tl.load(keys_ptr + row * stride_row + at, mask=live, other=0).to(tl.uint32, bitcast=True)
        position = tl.load(positions_ptr + row * stride_row + at, mask=live, other=0)
    valid = tl.sum((key > 0).to(tl.int32), 0)
    out = row * stride_out + tl.program_id(1) * K
    # A captured launch has chunks for the longest row that there may be: most of them are behind a row's end.
    if valid > 0:
        threshold = kth_largest(key, valid, K)
        larger = (key > threshold).to(tl.int32)
        missing = K - tl.sum(larger, 0)
        equal = (key == threshold).to(tl.int32)
        # Both running counts in one sum: neither reaches 2^16.
        counted = tl.cumsum(larger + (equal << 16), 0)
        place = (counted & 65535) + tl.minimum(counted >> 16, missing) - 1
        is_kept = (larger == 1) | ((equal == 1) & (counted >> 16 <= missing))
        tl.store(out_ptr + out + place, position, mask=is_kept)
        if not IS_LAST:
            tl.store(out_keys_ptr + out + place, key.to(tl.int32, bitcast=True), mask=is_kept)
    lane = tl.arange(0, CHUNK)
    is_empty = (lane >= valid) & (lane < K)
    tl.store(out_ptr + out + lane, -1, mask=is_empty)
    if not IS_LAST:
        tl.store(out_keys_ptr + out + lane, 0, mask=is_empty)


def warps_for(programs: int) -> int:
    """Returns how many share a chunk: few where programs fill the processors, since warps wait for each other."""
    return 4 if programs > MANY_PROGRAMS else 8


def launch(logits: torch.Tensor, num_keys: torch.Tensor, out: torch.Tensor) -> None:
    """Fills out; checked, non-empty arguments."""
    (rows, width), k = logits.shape, out.shape[1]
    if k >= width:
        position = torch.arange(k, dtype=torch.int32, device=out.device)
        out.copy_(torch.where(position < num_keys.unsqueeze(1), position, -1))
        return
    if k > MAX_K:
        raise KernelArgumentError(f"k: must be at most {MAX_K} on a GPU, got {k}")
    keys = positions = out
    stride = logits.stride(0)
    is_first = True
    with torch.cuda.device_of(logits):
        while True:
            is_last = width <= CHUNK
            chunk = triton.next_power_of_2(max(width, k)) if is_last else CHUNK
            chunks = triton.cdiv(max(width, 1), chunk)
            kept = (out, out) if is_last else out.new_empty(2, rows, chunks * k)
            narrow[(rows, chunks)](
                logits, keys, positions, num_keys, *kept, width, stride, chunks * k,
                K=k, CHUNK=chunk, IS_FIRST=is_first, IS_LAST=is_last, num_warps=warps_for(rows * chunks),
            )  # fmt: skip
            if is_last:
                return
            (keys, positions), width, stride, is_first = kept, chunks * k, chunks * k, False
