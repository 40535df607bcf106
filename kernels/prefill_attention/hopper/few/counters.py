"""Counters by which the programs of a launch wait for each other; all must be on the card at once, see `grid_barrier`.

One thread of a program looks, the others wait for it: where all warps look, 264 programs take 2 us to meet.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.hopper.barriers import thread_barrier


@gluon.jit
def signal(counter_ptr):
    """Counts this program; what it wrote before can be read by those who see that."""
    thread_barrier()
    gl.atomic_add(counter_ptr, 1, sem="release", scope="gpu")


@gluon.jit
def await_count(counter_ptr, count):
    """Waits until so much was counted."""
    seen = looked_at(counter_ptr)
    while seen < count:
        seen = looked_at(counter_ptr)
    # Once: looks that acquire would each empty the first-level cache.
    gl.inline_asm_elementwise(
        """
        {
            .reg .pred first;
            .reg .u32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            @first fence.acq_rel.gpu;
            mov.b32 $0, 0;
        }
        """,
        "=r", [], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    thread_barrier()


@gluon.jit
def looked_at(counter_ptr):
    """Returns a counter in a program's first thread, and more than any counter reaches in the others."""
    return gl.inline_asm_elementwise(
        """
        {
            .reg .pred first;
            .reg .u32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            mov.b32 $0, 0x7fffffff;
            @first ld.relaxed.gpu.global.b32 $0, [$1];
        }
        """,
        "=&r,l", [counter_ptr.to(gl.int64, bitcast=True)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
