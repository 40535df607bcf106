"""The work queue of a persistent kernel: items drawn from a counter in memory, passed on through shared memory.

One warp of a program, the producer, finds the next item and publishes its numbers; the other partitions take them.

    counters_ptr    items drawn beyond each program's first one, programs that are done; 0 between launches
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kernels.hopper.barriers import thread_barrier


@gluon.jit
def draw(counters_ptr, programs):
    """Returns the index of an item that no other of the launch's programs draws."""
    return gl.atomic_add(counters_ptr, 1, sem="relaxed", scope="gpu") + programs


@gluon.jit
def leave(counters_ptr, programs):
    """Counts this program as done; the last one sets the counters to 0 for the next launch. Returns whether it did."""
    done = gl.atomic_add(counters_ptr + 1, 1, sem="acq_rel", scope="gpu")
    is_last = done == programs - 1
    if is_last:
        gl.store(counters_ptr, 0)
        gl.store(counters_ptr + 1, 0)
    return is_last


@gluon.jit
def write_item(queue, first, item):
    """Stores an item's numbers from slot `first` on; called by one warp."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    zero = gl.full([1], 0, gl.int32, LAYOUT)
    for i in gl.static_range(len(item)):
        queue.index(first + i).store(zero + item[i])


@gluon.jit
def read_number(queue, slot, WARPS: gl.constexpr):
    """Returns one number of an item as a scalar; called by WARPS warps."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    return gl.max(queue.index(slot).load(LAYOUT), 0)


@gluon.jit
def publish(queue, full, empty, turn, item):
    """Publishes the item of a turn, seven numbers; called by one warp. The queue holds the items of two turns."""
    slot = turn % 2 * 8
    mbarrier.wait(empty.index(turn % 2), ((turn // 2) & 1) ^ 1)
    write_item(queue, slot, item)
    thread_barrier()
    mbarrier.arrive(full.index(turn % 2), count=1)


@gluon.jit
def take(queue, full, empty, turn):
    """Returns the seven numbers published for a turn; called by four warps."""
    slot = turn % 2 * 8
    mbarrier.wait(full.index(turn % 2), (turn // 2) & 1)
    first = read_number(queue, slot + 0, 4)
    second = read_number(queue, slot + 1, 4)
    third = read_number(queue, slot + 2, 4)
    fourth = read_number(queue, slot + 3, 4)
    fifth = read_number(queue, slot + 4, 4)
    sixth = read_number(queue, slot + 5, 4)
    seventh = read_number(queue, slot + 6, 4)
    thread_barrier()
    mbarrier.arrive(empty.index(turn % 2), count=1)
    return first, second, third, fourth, fifth, sixth, seventh


@gluon.jit
def publish_index(queue, full, empty, turn, index):
    """Publishes an item's index for a turn; called by one warp. The queue holds the indices of two turns."""
    mbarrier.wait(empty.index(turn % 2), ((turn // 2) & 1) ^ 1)
    write_item(queue, turn % 2, (index,))
    mbarrier.arrive(full.index(turn % 2), count=1)


@gluon.jit
def take_index(queue, full, empty, turn, WARPS: gl.constexpr):
    """Returns the index published for a turn; called by WARPS warps."""
    mbarrier.wait(full.index(turn % 2), (turn // 2) & 1)
    index = read_number(queue, turn % 2, WARPS)
    if WARPS > 1:
        thread_barrier()  # one thread arrives for all
    mbarrier.arrive(empty.index(turn % 2), count=1)
    return index
