"""Barriers: among the threads of a partition, and in shared memory between partitions."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

# Waits for all threads of a partition; Gluon renamed it after Triton 3.6.
thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.jit
def make_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """COUNT initialised mbarriers whose phase ends with ARRIVALS arrivals (and the bytes that are expected)."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def release_read(barrier):
    """Arrives at the barrier of memory that threads have read with plain loads and the copy engine overwrites next.

    The engine writes by another path than loads read, so loads that are still on their way when all threads have come
    here could see what it writes: without the fence 0.7 % of index_logits' launches did on an H200.
    """
    fence_async_shared()
    mbarrier.arrive(barrier, count=1)


@gluon.jit
def acquire():
    """Lets this thread read what was written before the counters that it has read said so."""
    gl.inline_asm_elementwise("fence.acq_rel.gpu; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def fence_async_global():
    """Orders what this thread reads and writes of global memory, and what the copy engine does for it."""
    gl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def grid_barrier(counters_ptr, arrivals):
    """Waits until it was called `arrivals` times in this launch; then all that came before the calls can be read.

    Each partition that takes part calls it once. Programs wait for each other, so all must be on the card at once: no
    more than fit, and `launch_cooperative_grid=True` starts none before there is room for all. Other launches do not
    wait for this one: they end and make room. `counters_ptr` has two counters, of those that came and of those that
    went on; both are 0 between launches.
    """
    thread_barrier()
    seen = gl.atomic_add(counters_ptr, 1, sem="acq_rel", scope="gpu") + 1
    while seen < arrivals:
        seen = gl.atomic_add(counters_ptr, 0, sem="acq_rel", scope="gpu")
    thread_barrier()
    # The last one to go on clears both: no one reads them any more.
    if gl.atomic_add(counters_ptr + 1, 1, sem="acq_rel", scope="gpu") == arrivals - 1:
        gl.store(counters_ptr, 0)
        gl.store(counters_ptr + 1, 0)
