"""Value columns of a launch of few rows: 64 of them, of all keys of a piece, on their way to shared memory; results.

What is read here does not depend on weights, so it is read before these are there.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from kernels.hopper.barriers import thread_barrier
from kernels.hopper.gathered.items import share_with


@gluon.jit
def gather_columns(keys, values, places, rows, part, tiles, ADDRESSES: gl.constexpr, WARPS: gl.constexpr):
    """Begins to copy columns 64 * part and on of `tiles` tiles of keys into values [tiles, 64, 64].

    `rows` are where the keys lie, places [of as many int32] room for them.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    places.store(rows)
    places_of = places._reinterpret(gl.int32, [places.shape[0] // 64, 64], PLAIN)
    column = part * 64 + gl.arange(0, 64, gl.SliceLayout(0, L))
    thread_barrier()
    for tile in range(tiles):
        from_ptr = ADDRESSES(keys, places_of.index(tile).load(gl.SliceLayout(1, L)))[:, None] + column[None, :]
        async_copy.async_copy_global_to_shared(values.index(tile), from_ptr)


@gluon.jit
def write_columns(out_ptr, result, token, part, group, HEADS: gl.constexpr, GROUP: gl.constexpr, WARPS: gl.constexpr):
    """Writes [64 columns, GROUP heads] of a token; neighbouring threads write neighbouring columns."""
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, WARPS], [0, 1])
    narrow = gl.convert_layout(result.to(gl.bfloat16), OUT)
    column = gl.arange(0, 64, gl.SliceLayout(1, OUT))[:, None]
    head = group * GROUP + gl.arange(0, GROUP, gl.SliceLayout(0, OUT))[None, :]
    to_ptr = out_ptr + token.to(gl.int64) * (HEADS * 512) + part * 64 + head * 512 + column
    gl.store(to_ptr, narrow, mask=(head < HEADS) & (column < 64))


@gluon.jit
def finish_columns(
    results, scratch, state, sink, stop, pieces,
    PIECE: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr, ARRIVALS: gl.constexpr, WARPS: gl.constexpr,
    VALUES: gl.constexpr,
):  # fmt: skip
    """Writes what a program has added up of a piece; of several pieces the program that comes last folds all, in their
    order. `state`: sums [64 columns, GROUP heads], sums of weights, and what was taken from scores."""
    _, _, _, acc_ptr, row_sum_ptr, arrivals_ptr = scratch
    acc, row_sum, top = state
    GROUPS: gl.constexpr = (HEADS + GROUP - 1) // GROUP
    part = gl.program_id(0) % 8
    group = gl.program_id(0) // 8
    token = gl.program_id(1)
    if stop <= PIECE:
        acc = acc * share_with(results, sink, top, row_sum)[None, :]
        write_columns(results[0], acc, token, part, group, HEADS, GROUP, WARPS)
    else:
        piece = gl.program_id(2)
        head = gl.arange(0, GROUP, gl.SliceLayout(0, VALUES))
        live = (stop + PIECE - 1) // PIECE
        unit = ((token * GROUPS + group) * 8 + part).to(gl.int64) * pieces
        sums = acc_ptr + unit * (64 * GROUP)
        totals = row_sum_ptr + unit * (2 * GROUP) + head
        gl.store(sums + piece * (64 * GROUP) + sums_at(VALUES, GROUP), acc)
        gl.store(totals + piece * (2 * GROUP), row_sum)
        gl.store(totals + piece * (2 * GROUP) + GROUP, top)
        thread_barrier()
        counter = arrivals_ptr + token * ARRIVALS + group * 8 + part
        if gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == live - 1:
            thread_barrier()
            acc, row_sum, top = fold_columns(sums, totals, live, GROUP, VALUES)
            acc = acc * share_with(results, sink, top, row_sum)[None, :]
            write_columns(results[0], acc, token, part, group, HEADS, GROUP, WARPS)


@gluon.jit
def sums_at(VALUES: gl.constexpr, GROUP: gl.constexpr):
    """Returns the offsets of a program's partial sums: two neighbouring heads of a column, then the next column."""
    column = gl.arange(0, 64, gl.SliceLayout(1, VALUES))[:, None]
    head = gl.arange(0, GROUP, gl.SliceLayout(0, VALUES))[None, :]
    return head // 8 * 512 + column * 8 + head % 8


@gluon.jit
def fold_columns(sums, totals, live, GROUP: gl.constexpr, VALUES: gl.constexpr):
    """Returns the softmax state of `live` pieces, two at least, as `consumers` folds them."""
    at = sums_at(VALUES, GROUP)
    acc = gl.load(sums + at, cache_modifier=".cg")
    row_sum = gl.load(totals, cache_modifier=".cg")
    row_max = gl.load(totals + GROUP, cache_modifier=".cg")
    part = gl.load(sums + 64 * GROUP + at, cache_modifier=".cg")
    for piece in range(1, live):
        part_sum = gl.load(totals + piece * (2 * GROUP), cache_modifier=".cg")
        part_max = gl.load(totals + piece * (2 * GROUP) + GROUP, cache_modifier=".cg")
        new_max = gl.maximum(row_max, part_max)
        keep = gl.exp2(row_max - new_max)
        weight = gl.exp2(part_max - new_max)
        acc = gl.fma(acc, gl.zeros_like(acc) + keep[None, :], part * weight[None, :])
        row_sum = gl.fma(row_sum, keep, part_sum * weight)
        row_max = new_max
        if piece + 1 < live:
            part = gl.load(sums + (piece + 1) * (64 * GROUP) + at, cache_modifier=".cg")
    return acc, row_sum, row_max
