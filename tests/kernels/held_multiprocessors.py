"""A launch that holds multiprocessors, so that programs of another one have no room there."""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def clock():
    """Returns the device's clock, ns."""
    return gl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=gl.int64, is_pure=False, pack=1)


@gluon.jit(do_not_specialize=["longest_ns"])
def hold_multiprocessors(out_ptr, released_ptr, longest_ns):
    """Each program leaves no room for another one on its multiprocessor, until it is released or `longest_ns` ended."""
    held = gl.allocate_shared_memory(gl.int32, [200, 256], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    begin = clock()
    held.index(0).store(gl.full([256], 1, gl.int32, gl.BlockedLayout([1], [32], [4], [0])))
    while (gl.load(released_ptr, volatile=True) == 0) & (clock() - begin < longest_ns):
        pass
    gl.store(out_ptr + gl.program_id(0), gl.sum(held.index(0).load(gl.BlockedLayout([1], [32], [4], [0])), 0))


class HeldMultiprocessors:
    """Multiprocessors that a launch on a stream of its own holds until `release`, 30 s at most."""

    def __init__(self, multiprocessors: int) -> None:
        self._out = torch.zeros(multiprocessors, dtype=torch.int32, device="cuda")
        self._released, already = (torch.full((1,), value, dtype=torch.int32, device="cuda") for value in (0, 1))
        self._one = torch.ones(1, dtype=torch.int32).pin_memory()
        hold_multiprocessors[(1,)](self._out, already, 0, num_warps=4)  # compiled before anything is held
        torch.cuda.synchronize()
        self._ended = torch.cuda.Event()
        with torch.cuda.stream(torch.cuda.Stream()):
            hold_multiprocessors[(multiprocessors,)](self._out, self._released, 30_000_000_000, num_warps=4)
            self._ended.record()

    def holds(self) -> bool:
        return not self._ended.query()

    def release(self) -> None:
        """Ends the launch; a copy needs no multiprocessor."""
        with torch.cuda.stream(torch.cuda.Stream()):
            self._released.copy_(self._one, non_blocking=True)
        torch.cuda.synchronize()
