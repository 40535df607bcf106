"""top_k in Gluon for Hopper: a guess from a sample sorts out most of a row, and one program chooses among what is left.

    many rows    a program takes rows, each from the sample to the choice: what it keeps of a row stays in the cache
    few rows     programs of spans take the sample each for itself and keep what reaches its bound; in a second launch
                 one program for a row chooses

Where the guess was bad a row is read once for each bit: that costs time, the choice is the same. No atomics.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.hopper.barriers import thread_barrier
from kernels.hopper.launches import allow_next_launch, wait_for_last_launch
from kernels.top_k.hopper.lists import choose_from_lists, choose_from_row
from kernels.top_k.hopper.steps import keep_largest, keep_row, keep_span, load_span, sampled_bound


@gluon.jit
def keep_all(out_ptr, count, K: gl.constexpr, BLOCK_K: gl.constexpr, WARPS: gl.constexpr):
    """Writes positions 0 to count, then -1."""
    i = gl.arange(0, BLOCK_K, gl.BlockedLayout([4], [32], [WARPS], [0]))
    gl.store(out_ptr + i, gl.where(i < count, i, -1), mask=i < K)


# What changes from batch to batch is not specialised on: a new value, or rows that begin elsewhere, must not mean a new
# compilation.
@gluon.jit(do_not_specialize=["stride_row", "width", "rows"], do_not_specialize_on_alignment=["num_keys_ptr"])
def choose_rows(logits_ptr, num_keys_ptr, counts_ptr, kept_ptr, out_ptr, stride_row, width, rows,
                K: gl.constexpr, BLOCK_K: gl.constexpr, SAFETY: gl.constexpr, SAMPLE: gl.constexpr, HELD: gl.constexpr,
                SLOTS: gl.constexpr, WARPS: gl.constexpr):  # fmt: skip
    """Programs that take rows; `counts` is [programs, WARPS], `kept` [programs, width]."""
    pid = gl.program_id(0)
    counts_ptr += pid * WARPS
    kept_ptr += pid.to(gl.int64) * width
    for row in range(pid, rows, gl.num_programs(0)):
        count = gl.load(num_keys_ptr + row)
        to_ptr = out_ptr + row.to(gl.int64) * K
        if count <= K:
            keep_all(to_ptr, count, K, BLOCK_K, WARPS)
        else:
            row_ptr = logits_ptr + row.to(gl.int64) * stride_row
            bound = sampled_bound(row_ptr, count, K, SAFETY, HELD // 2, SAMPLE, WARPS)
            part, first, size = keep_row(row_ptr, count, bound, kept_ptr, counts_ptr, SLOTS, WARPS)
            thread_barrier()  # what all warps kept can be read
            i = gl.arange(0, WARPS, gl.BlockedLayout([1], [32], [WARPS], [0]))
            total = gl.sum(gl.load(counts_ptr + i), 0)
            if total < K:
                choose_from_row(row_ptr, count, to_ptr, K, SLOTS, WARPS)
            elif total > HELD // 2:
                choose_from_lists(row_ptr, kept_ptr, first, size, gl.max(size, 0), total, to_ptr, K, SLOTS, WARPS, True)
            else:
                keep_largest(kept_ptr, counts_ptr, total, gl.to_tensor(WARPS), part, bound, to_ptr, K, HELD // 2, WARPS)
            thread_barrier()  # nobody reads it any more


@gluon.jit(do_not_specialize=["stride_row", "width", "size"], do_not_specialize_on_alignment=["num_keys_ptr"])
def keep_spans(logits_ptr, num_keys_ptr, bounds_ptr, counts_ptr, kept_ptr, stride_row, width, size,
               K: gl.constexpr, SAFETY: gl.constexpr, SAMPLE: gl.constexpr, HELD: gl.constexpr, SLOTS: gl.constexpr,
               WARPS: gl.constexpr):  # fmt: skip
    """Programs [spans of `size` logits, rows]; `kept` is [rows, width]: a span's begin where its logits do."""
    allow_next_launch()
    wait_for_last_launch()
    span = gl.program_id(0)
    row = gl.program_id(1).to(gl.int64)
    count = gl.load(num_keys_ptr + row)
    row_ptr = logits_ptr + row * stride_row
    kept = count * 0
    first = span * size
    # A captured launch has spans for the longest row that there may be: most of them are behind a row's end.
    if (count > K) & (first < count):
        stop = gl.minimum(count, first + size)
        logits = load_span(row_ptr, first, stop, SLOTS, WARPS)  # on their way while the bound is found
        bound = sampled_bound(row_ptr, count, K, SAFETY, HELD // 2, SAMPLE, WARPS)
        kept = keep_span(row_ptr, logits, first, stop, bound, kept_ptr + row * width + first, SLOTS, WARPS)
        gl.store(bounds_ptr + row, bound.to(gl.int32, bitcast=True))
    gl.store(counts_ptr + row * gl.num_programs(0) + span, kept)


@gluon.jit(do_not_specialize=["stride_row", "width", "spans", "size"], do_not_specialize_on_alignment=["num_keys_ptr"])
def choose_kept(logits_ptr, num_keys_ptr, bounds_ptr, counts_ptr, kept_ptr, out_ptr, stride_row, width, spans, size,
                K: gl.constexpr, BLOCK_K: gl.constexpr, SPANS: gl.constexpr, HELD: gl.constexpr,
                SLOTS: gl.constexpr, WARPS: gl.constexpr):  # fmt: skip
    """One program for a row of which spans kept some."""
    row = gl.program_id(0).to(gl.int64)
    to_ptr = out_ptr + row * K
    allow_next_launch()
    wait_for_last_launch()
    # These loads do not wait for each other. Each warp has all counts, so their sum passes no barrier.
    ALL: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 1], [32, 1], [1, WARPS], [0, 1]))
    i = gl.arange(0, SPANS, ALL)
    counts_ptr += row * spans
    count = gl.load(num_keys_ptr + row)
    counts = gl.load(counts_ptr + i, mask=i < spans, other=0)
    bound = gl.load(bounds_ptr + row).to(gl.uint32, bitcast=True)
    if count <= K:
        keep_all(to_ptr, count, K, BLOCK_K, WARPS)
    else:
        total = gl.sum(counts, 0)
        kept_ptr += row * width
        if (total < K) | (total > HELD):
            choose_from_row(logits_ptr + row * stride_row, count, to_ptr, K, SLOTS, WARPS)
        elif total > HELD // 2:
            keep_largest(kept_ptr, counts_ptr, total, spans, size, bound, to_ptr, K, HELD, WARPS)
        else:
            keep_largest(kept_ptr, counts_ptr, total, spans, size, bound, to_ptr, K, HELD // 2, WARPS)
