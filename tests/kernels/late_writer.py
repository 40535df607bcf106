"""A launch that lets the next one begin, and only later writes what that one reads."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.hopper.launches import allow_next_launch
from tests.kernels.held_multiprocessors import clock


@gluon.jit(do_not_specialize=["count", "delay_ns"])
def write_late(from_ptr, to_ptr, count, delay_ns):
    """One program copies `count` numbers after `delay_ns`."""
    allow_next_launch()
    begin = clock()
    while clock() - begin < delay_ns:
        pass
    place = gl.arange(0, 1024, gl.BlockedLayout([1], [32], [4], [0]))
    for first in range(0, count, 1024):
        at = first + place
        gl.store(to_ptr + at, gl.load(from_ptr + at, mask=at < count), mask=at < count)
