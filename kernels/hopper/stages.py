"""Stages of shared memory that two consumers give back to a producer by named barriers.

An mbarrier's arrival is one thread's, behind a barrier of its warpgroup. Here each warp arrives for itself and goes on:
two consumers of 128 threads, a producer of 32. Barriers 0 to 3 are Triton's.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def give_back(barrier):
    """Says for the calling warp that a stage has been read."""
    gl.inline_asm_elementwise(
        "bar.arrive $1, 288; mov.b32 $0, 0;", "=r,r", [barrier], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def await_return(barrier):
    """Waits, as the producer, until both consumers have given a stage back."""
    gl.inline_asm_elementwise(
        "bar.sync $1, 288; mov.b32 $0, 0;", "=r,r", [barrier], dtype=gl.int32, is_pure=False, pack=1
    )
