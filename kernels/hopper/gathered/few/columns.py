"""Value columns of a launch of few rows: 64 of them, of all keys of a piece, on their way to shared memory; results.

What is read here does not depend on weights, so it is read before these are there.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from kernels.hopper.barriers import thread_barrier


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
