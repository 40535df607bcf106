"""top_k in Triton: a guess from a sample sorts out most of a row, and one program chooses among what is left.

    sample     a few of a row's logits give a bound that somewhat more than k of the row are likely to reach
    filter     programs of CHUNK logits write down, each for itself, which reach the bound
    choose     one program for a row finds the k-th largest of these bit by bit: a count for each bit, and none once
               exactly k are left. Where the guess was bad (fewer than k, or more than it can hold) it reads the row

Keys are integers in the order of the logits. No histogram, so no atomics. Equals are kept in the order of their
positions, and a bad guess costs time alone: what is chosen is a function of the row.
"""

import torch
import triton
import triton.language as tl

from kernels.errors import KernelArgumentError

CHUNK = 4096
# Of a program that reads a row, and of the three launches with few rows, which want each row to be done soon, and with
# many: on an H200 30 us against 36 for one row of 65,536, and 707 against 602 for 2,048 of them.
WARPS = 8
FEW_ROWS_WARPS, MANY_ROWS_WARPS = (16, 8, 16), (4, 4, 8)
FEW_ROWS = 128
# Most keys that one program can hold in registers to choose from.
HELD = 8192
MAX_K = HELD // 2
# Logits of a row that are sampled; about 64 of them are among the 2,048 largest of 65,536.
SAMPLE = 2048
# Standard deviations between the guess and where it would leave too few.
SAFETY = 4.5


@triton.jit
def ordered(logits):
    """uint32 in the order of fp32 numbers, none of them 0."""
    plain = tl.where(logits == logits, logits, float("-inf")) + 0.0
    bits = plain.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit
def kth_largest(key, valid, k, LEAST_BIT: tl.constexpr):
    """Returns the largest number, of those with few bits first, that at least k of the keys reach; 1 where there is no
    choice. Bits below LEAST_BIT stay 0."""
    threshold = tl.full([], 1, tl.uint32)
    if valid > k:
        threshold = tl.full([], 0, tl.uint32)
        reached = valid
        bit = tl.full([], 31, tl.int32)
        while (bit >= LEAST_BIT) & (reached != k):
            trial = threshold | (tl.full([], 1, tl.uint32) << bit.to(tl.uint32))
            count = tl.sum((key >= trial).to(tl.int32), 0)
            is_reached = count >= k
            threshold = tl.where(is_reached, trial, threshold)
            reached = tl.where(is_reached, count, reached)
            bit -= 1
    return threshold


@triton.jit
def keep_largest(key, position, valid, out_ptr, K: tl.constexpr):
    """Writes the positions of the K largest of [n] keys, in their order; a key of 0 is none."""
    threshold = kth_largest(key, valid, K, 0)
    larger = (key > threshold).to(tl.int32)
    missing = K - tl.sum(larger, 0)
    equal = (key == threshold).to(tl.int32)
    # Both running counts in one sum: neither reaches 2^16.
    counted = tl.cumsum(larger + (equal << 16), 0)
    place = (counted & 65535) + tl.minimum(counted >> 16, missing) - 1
    is_kept = (larger == 1) | ((equal == 1) & (counted >> 16 <= missing))
    tl.store(out_ptr + place, position, mask=is_kept)


@triton.jit
def keep_all(out_ptr, count, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Writes positions 0 to count, then -1."""
    lane = tl.arange(0, BLOCK_K)
    tl.store(out_ptr + lane, tl.where(lane < count, lane, -1), mask=lane < K)


# What changes from batch to batch is not specialised on: a new value, or rows that begin elsewhere, must not mean a new
# compilation.
@triton.jit(do_not_specialize_on_alignment=["num_keys_ptr"])
def keep_all_rows(num_keys_ptr, out_ptr, K: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK places of a row that has no more than K logits."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    position = tl.where(lane < tl.load(num_keys_ptr + row), lane, -1)
    tl.store(out_ptr + row * K + lane, position, mask=lane < K)


@triton.jit(do_not_specialize=["stride_row"], do_not_specialize_on_alignment=["num_keys_ptr"])
def choose_row(logits_ptr, num_keys_ptr, out_ptr, stride_row, K: tl.constexpr, BLOCK_K: tl.constexpr,
               HELD: tl.constexpr):  # fmt: skip
    """One program for a row that it can hold."""
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(num_keys_ptr + row)
    if count <= K:
        keep_all(out_ptr + row * K, count, K, BLOCK_K)
    else:
        position = tl.arange(0, HELD)
        logits = tl.load(logits_ptr + row * stride_row + position, mask=position < count, other=0.0)
        keep_largest(tl.where(position < count, ordered(logits), 0), position, count, out_ptr + row * K, K)


@triton.jit(do_not_specialize=["stride_row"], do_not_specialize_on_alignment=["num_keys_ptr"])
def sample_rows(logits_ptr, num_keys_ptr, bounds_ptr, stride_row, SAFETY: tl.constexpr, K: tl.constexpr,
                LEAST: tl.constexpr, SAMPLE: tl.constexpr):  # fmt: skip
    """Stores a bound that slightly more than K of a row's logits probably reach; 1 where all may be kept."""
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(num_keys_ptr + row)
    bound = tl.full([], 1, tl.uint32)
    if count > LEAST:
        at = (tl.arange(0, SAMPLE).to(tl.int64) * count // SAMPLE).to(tl.int32)
        key = ordered(tl.load(logits_ptr + row * stride_row + at))
        expected = K * SAMPLE / count.to(tl.float32)
        rank = (expected + SAFETY * tl.sqrt(expected) + 1.0).to(tl.int32)
        # Sixteen bits are a bound that is nearly as good.
        bound = tl.maximum(kth_largest(key, SAMPLE, rank, 16), 1)
    tl.store(bounds_ptr + row, bound.to(tl.int32, bitcast=True))


@triton.jit(do_not_specialize=["stride_row", "width"], do_not_specialize_on_alignment=["num_keys_ptr"])
def filter_chunks(logits_ptr, num_keys_ptr, bounds_ptr, counts_ptr, keys_ptr, positions_ptr, stride_row, width,
                  K: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """Stores the keys and positions of a chunk that reach the bound, in order of positions, and their count.

    Keys and positions are [rows, width]: a chunk's begin where its logits do.
    """
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * CHUNK
    count = tl.load(num_keys_ptr + row)
    slot = row * tl.num_programs(1) + tl.program_id(1)
    # A captured launch has chunks for the longest row that there may be: most of them are behind a row's end.
    if (count > K) & (first < count):
        position = first + tl.arange(0, CHUNK)
        live = position < count
        key = ordered(tl.load(logits_ptr + row * stride_row + position, mask=live, other=0.0))
        bound = tl.load(bounds_ptr + row).to(tl.uint32, bitcast=True)
        reaches = live & (key >= bound)
        place = row * width + first + tl.cumsum(reaches.to(tl.int32), 0) - 1
        tl.store(keys_ptr + place, key.to(tl.int32, bitcast=True), mask=reaches)
        tl.store(positions_ptr + place, position, mask=reaches)
        tl.store(counts_ptr + slot, tl.sum(reaches.to(tl.int32), 0))
    else:
        tl.store(counts_ptr + slot, 0)


@triton.jit
def choose_kept(
    counts_ptr, keys_ptr, positions_ptr, total, chunks, out_ptr,
    K: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """Chooses among the keys that all chunks kept, at most HELD of them, read in order of positions."""
    STEP: tl.constexpr = CHUNKS if CHUNKS < 16 else 16
    lane = tl.arange(0, HELD)
    at = lane
    end = tl.full([], 0, tl.int32)
    # Loads of one step do not wait for each other; all at once fill the registers where rows are long.
    for first in tl.range(0, chunks, STEP):
        for i in tl.static_range(STEP):
            kept = tl.load(counts_ptr + first + i, mask=first + i < chunks, other=0)
            end += kept
            at += tl.where(lane >= end, CHUNK - kept, 0)
    key = tl.load(keys_ptr + at, mask=lane < total, other=0).to(tl.uint32, bitcast=True)
    position = tl.load(positions_ptr + at, mask=lane < total, other=0)
    keep_largest(key, position, total, out_ptr, K)


@triton.jit
def count_reaching(row_ptr, count, trial, TILE: tl.constexpr):
    lane = tl.arange(0, TILE)
    total = tl.zeros([TILE], tl.int32)
    for first in tl.range(0, count, TILE):
        live = first + lane < count
        key = ordered(tl.load(row_ptr + first + lane, mask=live, other=0.0))
        total += (live & (key >= trial)).to(tl.int32)
    return tl.sum(total, 0)


@triton.jit
def read_row(row_ptr, count, out_ptr, K: tl.constexpr, TILE: tl.constexpr):
    """The choice from a row that is read once for each bit and once more."""
    threshold = tl.full([], 0, tl.uint32)
    reached = count
    bit = tl.full([], 31, tl.int32)
    while (bit >= 0) & (reached != K):
        trial = threshold | (tl.full([], 1, tl.uint32) << bit.to(tl.uint32))
        reaching = count_reaching(row_ptr, count, trial, TILE)
        threshold = tl.where(reaching >= K, trial, threshold)
        reached = tl.where(reaching >= K, reaching, reached)
        bit -= 1
    missing = K - count_reaching(row_ptr, count, threshold + 1, TILE)
    lane = tl.arange(0, TILE)
    larger_before = tl.full([], 0, tl.int32)
    equal_before = tl.full([], 0, tl.int32)
    for first in tl.range(0, count, TILE):
        live = first + lane < count
        key = ordered(tl.load(row_ptr + first + lane, mask=live, other=0.0))
        larger = (live & (key > threshold)).to(tl.int32)
        equal = (live & (key == threshold)).to(tl.int32)
        counted = tl.cumsum(larger + (equal << 16), 0)
        equals = equal_before + (counted >> 16)
        place = larger_before + (counted & 65535) + tl.minimum(equals, missing) - 1
        is_kept = (larger == 1) | ((equal == 1) & (equals <= missing))
        tl.store(out_ptr + place, first + lane, mask=is_kept)
        larger_before += tl.sum(larger, 0)
        equal_before += tl.sum(equal, 0)


@triton.jit(do_not_specialize=["stride_row", "width", "chunks"], do_not_specialize_on_alignment=["num_keys_ptr"])
def choose_filtered(
    logits_ptr, num_keys_ptr, counts_ptr, keys_ptr, positions_ptr, out_ptr, stride_row, width, chunks,
    K: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """One program for a row of which the chunks kept some."""
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(num_keys_ptr + row)
    to_ptr = out_ptr + row * K
    if count <= K:
        keep_all(to_ptr, count, K, BLOCK_K)
    else:
        chunk = tl.arange(0, CHUNKS)
        counts_ptr += row * chunks
        keys_ptr += row * width
        positions_ptr += row * width
        total = tl.sum(tl.load(counts_ptr + chunk, mask=chunk < chunks, other=0), 0)
        if (total < K) | (total > HELD):
            read_row(logits_ptr + row * stride_row, count, to_ptr, K, CHUNK)
        elif total > HELD // 2:
            choose_kept(counts_ptr, keys_ptr, positions_ptr, total, chunks, to_ptr, K, CHUNK, CHUNKS, HELD)
        else:
            choose_kept(counts_ptr, keys_ptr, positions_ptr, total, chunks, to_ptr, K, CHUNK, CHUNKS, HELD // 2)


def launch(logits: torch.Tensor, num_keys: torch.Tensor, out: torch.Tensor) -> None:
    """Fills out; checked, non-empty arguments."""
    (rows, width), k = logits.shape, out.shape[1]
    if width > k > MAX_K:
        raise KernelArgumentError(f"k: must be at most {MAX_K} on a GPU, got {k}")
    block_k = triton.next_power_of_2(k)
    with torch.cuda.device_of(logits):
        if k >= width:
            block = min(block_k, HELD)
            keep_all_rows[(rows, triton.cdiv(k, block))](num_keys, out, k, block, num_warps=WARPS)
        elif width <= HELD:
            held = triton.next_power_of_2(width)
            choose_row[(rows,)](logits, num_keys, out, logits.stride(0), k, block_k, held, num_warps=WARPS)
        else:
            _filter_and_choose(logits, num_keys, out, block_k)


def _filter_and_choose(logits: torch.Tensor, num_keys: torch.Tensor, out: torch.Tensor, block_k: int) -> None:
    """Fills out, for rows that are wider than what one program can hold."""
    (rows, width), k, stride = logits.shape, out.shape[1], logits.stride(0)
    chunks, held = triton.cdiv(width, CHUNK), held_of(block_k)
    bounds, counts = (torch.empty(n, dtype=torch.int32, device=out.device) for n in (rows, rows * chunks))
    kept = torch.empty(2, rows, width, dtype=torch.int32, device=out.device)
    warps = FEW_ROWS_WARPS if rows <= FEW_ROWS else MANY_ROWS_WARPS
    sample_rows[(rows,)](logits, num_keys, bounds, stride, SAFETY, k, held // 2, SAMPLE, num_warps=warps[0])
    filter_chunks[(rows, chunks)](logits, num_keys, bounds, counts, *kept, stride, width, k, CHUNK, num_warps=warps[1])
    choose_filtered[(rows,)](
        logits, num_keys, counts, *kept, out, stride, width, chunks, k, block_k, CHUNK,
        triton.next_power_of_2(chunks), held, num_warps=warps[2],
    )  # fmt: skip


def held_of(block_k: int) -> int:
    """Returns the most logits of a row that chunks may keep for a choice of up to block_k."""
    return min(max(4 * block_k, 1024), HELD)
