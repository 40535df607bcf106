"""Places: which program of a launch begins with which split, where two programs share a multiprocessor.

Which two they are differs from launch to launch. The one that lies in a multiprocessor's first warps takes the next
place from 0 on, the other one the next place from the last one down. However programs are dealt out, each has a place
of its own. Splits come largest first: where they are no more than multiprocessors, each has one for itself; where they
are more, the largest share theirs with the smallest.

    work_ptr    splits drawn, programs that are done, the next place from 0 on, and the next from the last one down,
                which counts from -1 downwards; all are as they were after each launch
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.hopper.work_queue import leave

# Warps of a program: those that compute, and as many for the producers, which come in fours.
WARPS = gl.constexpr(8)


@gluon.jit
def claim_place(work_ptr):
    """Returns the program's place.

    Places are distinct whatever %warpid says, which the hardware does not promise. One thread claims for all.
    """
    warp = gl.inline_asm_elementwise("mov.u32 $0, %warpid;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    other = warp // WARPS % 2
    place = gl.atomic_add(work_ptr + 2 + other, 1 - 2 * other, sem="relaxed", scope="gpu")
    return gl.where(place < 0, gl.num_programs(0) + place, place)


@gluon.jit
def leave_place(work_ptr):
    """Counts this program as done; the last one sets the counters to what the next launch begins with."""
    if leave(work_ptr, gl.num_programs(0)):
        gl.store(work_ptr + 2, 0)
        gl.store(work_ptr + 3, -1)
