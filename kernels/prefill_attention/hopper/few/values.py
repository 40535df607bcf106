"""Values: an adder adds up 64 columns of ROWS rows, key tile after key tile.

Columns are the rows of the products, so that a program may have fewer rows than 64.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.hopper.barriers import thread_barrier
from kernels.prefill_attention.hopper.few.counters import await_count
from kernels.prefill_attention.hopper.few.tiles import KEYS, copy_rows, head_ptr, page_row

# Key tiles whose rows and factors are held in shared memory at a time.
MOST_PLACES = gl.constexpr(32)


@gluon.jit
def add_values(
    scratch, ready, v_pages, table_ptr, acc, row_sum, slot, inside, tile, places, kv_len, head, column, buffers,
    HEADS: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, HND: gl.constexpr, ROWS: gl.constexpr,
    STAGES: gl.constexpr, VALUES: gl.constexpr,
):  # fmt: skip
    """Returns (acc [64, ROWS], row_sum) with up to MOST_PLACES key tiles from `tile` on added.

    The first one's weights lie at `slot`. `ready` is a counter, and what it reaches when the weights are there.
    """
    _, decays_ptr, sums_ptr, weights_ptr = scratch
    values, shares, rows, decays, parts = buffers
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    KEY: gl.constexpr = gl.SliceLayout(1, L)
    FLAT: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    HEAD: gl.constexpr = gl.SliceLayout(0, VALUES)
    WIDTH: gl.constexpr = D if HND else HEADS * D
    from_ptr = head_ptr(v_pages[0], head, D, PAGE, HND) + column
    weights = weights_ptr + slot.to(gl.int64) * (64 * KEYS) + inside * KEYS
    key = gl.arange(0, MOST_PLACES * KEYS, FLAT)
    rows.store(page_row(table_ptr, tile * KEYS + key, kv_len, v_pages[1], PAGE))
    rows_of = rows._reinterpret(gl.int32, [MOST_PLACES, KEYS], PLAIN)
    decays_of = decays._reinterpret(gl.float32, [MOST_PLACES, ROWS], PLAIN)
    parts_of = parts._reinterpret(gl.float32, [MOST_PLACES, ROWS], PLAIN)
    thread_barrier()
    for stage in gl.static_range(STAGES - 1):
        if stage < places:
            copy_rows(values.index(stage), from_ptr, rows_of.index(stage).load(KEY), WIDTH, 64)
    await_count(ready[0], ready[1])
    for stage in gl.static_range(STAGES - 1):
        if stage < places:
            copy_shares(shares.index(stage), weights + stage * (64 * KEYS), ROWS)
        async_copy.commit_group()
    factor = gl.arange(0, MOST_PLACES * ROWS, FLAT)
    at = (slot + factor // ROWS) * 64 + inside + factor % ROWS
    there = factor // ROWS < places
    decays.store(gl.load(decays_ptr + at, mask=there, other=0.0, cache_modifier=".cg"))
    parts.store(gl.load(sums_ptr + at, mask=there, other=0.0, cache_modifier=".cg"))
    thread_barrier()
    decay = decays_of.index(0).load(HEAD)
    for i in range(places):
        async_copy.wait_group(STAGES - 2)
        thread_barrier()
        fence_async_shared()
        used = i % STAGES
        added = warpgroup_mma(
            values.index(used).permute((1, 0)), shares.index(used).permute((1, 0)), acc * decay[None, :],
            is_async=True,
        )  # fmt: skip
        # While the product is made.
        ahead = i + STAGES - 1
        if ahead < places:
            copy_rows(values.index(ahead % STAGES), from_ptr, rows_of.index(ahead).load(KEY), WIDTH, 64)
            copy_shares(shares.index(ahead % STAGES), weights + ahead * (64 * KEYS), ROWS)
        async_copy.commit_group()
        row_sum = row_sum * decay + parts_of.index(i).load(HEAD)
        decay = decays_of.index(gl.minimum(i + 1, places - 1)).load(HEAD)
        acc = warpgroup_mma_wait(0, deps=[added])
    async_copy.wait_group(0)
    thread_barrier()
    return acc, row_sum


@gluon.jit
def copy_shares(target, from_ptr, ROWS: gl.constexpr):
    """Begins to copy ROWS rows of a tile's weights."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    row = gl.arange(0, ROWS, gl.SliceLayout(1, L))
    key = gl.arange(0, KEYS, gl.SliceLayout(0, L))
    async_copy.async_copy_global_to_shared(target, from_ptr + row[:, None] * KEYS + key[None, :])
