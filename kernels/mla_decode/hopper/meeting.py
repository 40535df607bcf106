"""A meeting of a launch's programs at which none waits for ever, so that they need not be on the card at once."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.hopper.barriers import thread_barrier

# Looks at the counter until a program leaves, and how many more for each tile of latents of a program: a tile takes
# 2 us where the memory is the limit, a look less than 0.6. A program without latents comes when the launch begins.
LOOKS, LOOKS_PER_TILE = gl.constexpr(1024), gl.constexpr(16)
LEFT = gl.constexpr(0x10000)
NO_TASK = gl.constexpr(1 << 30)


@gluon.jit
def meet(counters_ptr, tiles):
    """Returns which of the launch's tasks a program begins with, and how far on its next one lies.

    What all programs wrote before they came can then be read. A program that has waited in vain, since others have no
    room yet, leaves and makes room; then the last one to come has all tasks. `counters_ptr` has the number of meetings
    so far and two counters, by turns a meeting's and the next one's: of programs that came, and LEFT for each that
    left. `tiles` is how many a program has.
    """
    programs = gl.num_programs(0)
    meetings = gl.load(counters_ptr, volatile=True)
    counter_ptr = counters_ptr + 1 + (meetings & 1)
    thread_barrier()
    seen = gl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") + 1
    is_last = seen % LEFT == programs
    if is_last:
        # No program looks at these any more.
        gl.store(counters_ptr + 2 - (meetings & 1), 0)
        gl.store(counters_ptr, meetings + 1)
    looks = 0
    leaves = False
    while (seen % LEFT < programs) & (leaves == 0):
        if looks < LOOKS + LOOKS_PER_TILE * tiles:
            seen = gl.atomic_add(counter_ptr, 0, sem="acq_rel", scope="gpu")
        else:
            found = gl.atomic_cas(counter_ptr, seen, seen + LEFT, sem="acq_rel", scope="gpu")
            leaves = found == seen
            seen = found
        looks += 1
    thread_barrier()
    all_stayed = seen < LEFT
    first = gl.where(all_stayed, gl.program_id(0), gl.where(is_last, 0, NO_TASK))
    return gl.where(leaves, NO_TASK, first), gl.where(all_stayed, programs, 1)
