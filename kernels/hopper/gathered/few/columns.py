"""Value columns of a launch of few rows: 64 of them, of all keys of a piece, on their way to shared memory; results.

What is read here does not depend on weights, so it is read before these are there.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from kernels.hopper.barriers import thread_barrier
from kernels.hopper.gathered.items import share_with


@gluon.jit
def gather_columns(keys, values, places, rows, tiles, ADDRESSES: gl.constexpr):
    """Begins to copy a program's 64 columns of `tiles` tiles of keys into values [tiles, 64, 64].

    `rows` are where the keys lie, places [of as many int32] room for them.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    places.store(rows)
    places_of = places._reinterpret(gl.int32, [places.shape[0] // 64, 64], PLAIN)
    column = gl.program_id(0) % 8 * 64 + gl.arange(0, 64, gl.SliceLayout(0, L))
    thread_barrier()
    for tile in range(tiles):
        from_ptr = ADDRESSES(keys, places_of.index(tile).load(gl.SliceLayout(1, L)))[:, None] + column[None, :]
        async_copy.async_copy_global_to_shared(values.index(tile), from_ptr)


@gluon.jit
def write_columns(out_ptr, result, HEADS: gl.constexpr, GROUP: gl.constexpr):
    """Writes [64 columns, GROUP heads] of a program; neighbouring threads write neighbouring columns."""
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    narrow = gl.convert_layout(result.to(gl.bfloat16), OUT)
    column = gl.arange(0, 64, gl.SliceLayout(1, OUT))[:, None]
    head = gl.program_id(0) // 8 * GROUP + gl.arange(0, GROUP, gl.SliceLayout(0, OUT))[None, :]
    out_ptr += gl.program_id(1).to(gl.int64) * (HEADS * 512) + gl.program_id(0) % 8 * 64
    to_ptr = out_ptr + head * 512 + column
    gl.store(to_ptr, narrow, mask=(head < HEADS) & (column < 64))


@gluon.jit
def finish_piece(
    scratch, results, sums_of_piece, sink, piece, pieces, stop,
    PIECE: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr, ARRIVALS: gl.constexpr, MANY: gl.constexpr,
    VALUES: gl.constexpr,
):  # fmt: skip
    """Writes a piece's columns where it is the only one, else its sums; the program that comes last folds all."""
    if MANY:
        if stop > PIECE:
            hand_on(scratch, results, sums_of_piece, sink, piece, pieces, stop, PIECE, HEADS, GROUP, ARRIVALS, VALUES)
        else:
            write_result(results, sums_of_piece, sink, HEADS, GROUP)
    else:
        write_result(results, sums_of_piece, sink, HEADS, GROUP)


@gluon.jit
def hand_on(
    scratch, results, sums_of_piece, sink, piece, pieces, stop,
    PIECE: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr, ARRIVALS: gl.constexpr, VALUES: gl.constexpr,
):  # fmt: skip
    """Writes a piece's sums; the program that comes last folds those of all pieces."""
    acc, row_sum, top = sums_of_piece
    _, _, _, _, _, _, acc_ptr, row_sum_ptr, row_max_ptr, arrivals_ptr = scratch
    GROUPS: gl.constexpr = (HEADS + GROUP - 1) // GROUP
    unit = gl.program_id(1) * GROUPS * 8 + gl.program_id(0)
    first = unit.to(gl.int64) * pieces
    sums, totals, tops = acc_ptr + first * (64 * GROUP), row_sum_ptr + first * GROUP, row_max_ptr + first * GROUP
    head = gl.arange(0, GROUP, gl.SliceLayout(0, VALUES))
    gl.store(sums + piece * (64 * GROUP) + sums_at(VALUES, GROUP), acc)
    gl.store(totals + piece * GROUP + head, row_sum)
    gl.store(tops + piece * GROUP + head, top)
    thread_barrier()
    counter = arrivals_ptr + gl.program_id(1) * ARRIVALS + gl.program_id(0)
    if gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == (stop + PIECE - 1) // PIECE - 1:
        thread_barrier()
        state = fold_columns(sums, totals, tops, (stop + PIECE - 1) // PIECE, GROUP, VALUES)
        write_result(results, state, sink, HEADS, GROUP)


@gluon.jit
def write_result(results, state, sink, HEADS: gl.constexpr, GROUP: gl.constexpr):
    """Writes a program's columns of the output."""
    acc, row_sum, top = state
    write_columns(results[0], acc * share_with(results, sink, top, row_sum)[None, :], HEADS, GROUP)


@gluon.jit
def sums_at(VALUES: gl.constexpr, GROUP: gl.constexpr):
    """Returns the offsets of a program's partial sums: two neighbouring heads of a column, then the next column."""
    column = gl.arange(0, 64, gl.SliceLayout(1, VALUES))[:, None]
    head = gl.arange(0, GROUP, gl.SliceLayout(0, VALUES))[None, :]
    return head // 8 * 512 + column * 8 + head % 8


@gluon.jit
def fold_columns(sums, totals, tops, live, GROUP: gl.constexpr, VALUES: gl.constexpr):
    """Returns the softmax state of `live` pieces, two at least, as `consumers` folds them."""
    HEAD: gl.constexpr = gl.SliceLayout(0, VALUES)
    at = sums_at(VALUES, GROUP)
    head = gl.arange(0, GROUP, HEAD)
    acc = gl.load(sums + at, cache_modifier=".cg")
    row_sum = gl.load(totals + head, cache_modifier=".cg")
    row_max = gl.load(tops + head, cache_modifier=".cg")
    part = gl.load(sums + 64 * GROUP + at, cache_modifier=".cg")
    for piece in range(1, live):
        part_sum = gl.load(totals + piece * GROUP + head, cache_modifier=".cg")
        part_max = gl.load(tops + piece * GROUP + head, cache_modifier=".cg")
        new_max = gl.maximum(row_max, part_max)
        keep = gl.exp2(row_max - new_max)
        weight = gl.exp2(part_max - new_max)
        acc = gl.fma(acc, gl.zeros_like(acc) + keep[None, :], part * weight[None, :])
        row_sum = gl.fma(row_sum, keep, part_sum * weight)
        row_max = new_max
        if piece + 1 < live:
            part = gl.load(sums + (piece + 1) * (64 * GROUP) + at, cache_modifier=".cg")
    return acc, row_sum, row_max
