"""A mailbox of two items in shared memory, seven numbers each: the producer looks items up, consumers only read them.

Knows no op: what the seven numbers mean is between those who publish and those who take.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

# Gluon's name of the barrier among a partition's threads, in 3.6 and after it.
thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier


@gluon.jit
def publish(mail, full, empty, turn, item):
    """Hands a turn's item to the consumers, from one warp."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    slot = turn % 2 * 8
    mbarrier.wait(empty.index(turn % 2), ((turn // 2) & 1) ^ 1)
    for i in gl.static_range(7):
        mail.index(slot + i).store(gl.full([1], 0, gl.int32, ONE) + item[i])
    thread_barrier()
    mbarrier.arrive(full.index(turn % 2), count=1)


@gluon.jit
def take(mail, full, empty, turn):
    """A turn's item as the producer found it, in four warps: what they would otherwise wait for memory to learn."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    slot = turn % 2 * 8
    mbarrier.wait(full.index(turn % 2), (turn // 2) & 1)
    first = gl.max(mail.index(slot + 0).load(ONE), 0)
    second = gl.max(mail.index(slot + 1).load(ONE), 0)
    third = gl.max(mail.index(slot + 2).load(ONE), 0)
    fourth = gl.max(mail.index(slot + 3).load(ONE), 0)
    fifth = gl.max(mail.index(slot + 4).load(ONE), 0)
    sixth = gl.max(mail.index(slot + 5).load(ONE), 0)
    seventh = gl.max(mail.index(slot + 6).load(ONE), 0)
    thread_barrier()
    mbarrier.arrive(empty.index(turn % 2), count=1)
    return first, second, third, fourth, fifth, sixth, seventh
