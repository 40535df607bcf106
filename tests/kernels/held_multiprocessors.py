"""A launch that holds multiprocessors, so that programs of another one have no room there."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def clock():
    """Returns the device's clock, ns."""
    return gl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=gl.int64, is_pure=False, pack=1)


@gluon.jit(do_not_specialize=["duration_ns"])
def hold_multiprocessors(out_ptr, duration_ns):
    """Each program leaves no room for another one on its multiprocessor."""
    held = gl.allocate_shared_memory(gl.int32, [200, 256], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    begin = clock()
    held.index(0).store(gl.full([256], 1, gl.int32, gl.BlockedLayout([1], [32], [4], [0])))
    while clock() - begin < duration_ns:
        pass
    gl.store(out_ptr + gl.program_id(0), gl.sum(held.index(0).load(gl.BlockedLayout([1], [32], [4], [0])), 0))
