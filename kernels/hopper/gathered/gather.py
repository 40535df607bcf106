"""The gathering warps of attention over gathered keys: keys, row by row, and queries into shared memory.

They run ahead of the consumers into the next item.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma

from kernels.hopper.gathered.items import item_of


@gluon.jit
def gather(
    queries, keys, items, shared, bars,
    COUNT: gl.constexpr, LIST: gl.constexpr, ROWS: gl.constexpr, ADDRESSES: gl.constexpr,
    SPLITS: gl.constexpr, pieces, PIECE: gl.constexpr, HEADS: gl.constexpr, ROPE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    # Eight threads for 128 bytes of a row, four rows of a warp.
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    q_half_desc, q_rope_desc = queries
    q_left, q_right, q_rope, left, right, rope = shared
    q_full, q_empty, left_full, left_empty, right_full, right_empty = bars
    row = gl.arange(0, 64, gl.SliceLayout(1, L))
    half = gl.arange(0, 256, gl.SliceLayout(0, L))
    tail = gl.arange(0, 64, gl.SliceLayout(0, L))
    step = 0
    turn = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        token, tile, start, stop = item_of(item, keys, COUNT, SPLITS, pieces, PIECE, HEADS)
        if start < stop:
            of_token = LIST(keys, token)
            rows = ROWS(keys, of_token, start, stop, row)
            for first in range(start, stop, 64):
                s = step % STAGES
                phase = ((step // STAGES) & 1) ^ 1
                at = ADDRESSES(keys, rows)[:, None]
                mbarrier.wait(left_empty.index(s), phase)
                if ROPE:
                    async_copy.async_copy_global_to_shared(rope.index(s), at + (512 + tail)[None, :])
                async_copy.async_copy_global_to_shared(left.index(s), at + half[None, :])
                async_copy.mbarrier_arrive(left_full.index(s), increment_count=False)
                mbarrier.wait(right_empty.index(s), phase)
                async_copy.async_copy_global_to_shared(right.index(s), at + (256 + half)[None, :])
                async_copy.mbarrier_arrive(right_full.index(s), increment_count=False)
                if first == start:
                    # Behind the first keys: these have room before the last item's queries are done with.
                    q_row = token * HEADS + tile * 64
                    mbarrier.wait(q_empty.index(0), (turn & 1) ^ 1)
                    mbarrier.expect(q_full.index(0), 64 * (512 + ROPE) * 2)
                    tma.async_copy_global_to_shared(q_half_desc, [q_row, 0], q_full.index(0), q_left)
                    tma.async_copy_global_to_shared(q_half_desc, [q_row, 256], q_full.index(0), q_right)
                    if ROPE:
                        tma.async_copy_global_to_shared(q_rope_desc, [q_row, 512], q_full.index(0), q_rope)
                # Read behind this tile's copies, while there is no room for the next.
                rows = ROWS(keys, of_token, first + 64, stop, row)
                step += 1
            turn += 1
