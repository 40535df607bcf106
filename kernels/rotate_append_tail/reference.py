"""rotate_append_tail in plain torch: norm, rotation and append one after the other."""

from kernels.backend import Backend
from kernels.key_rows import append_rows
from kernels.rms_norm import rms_norm
from kernels.rotate_append_tail.call import RotateAppendTailCall
from kernels.rotation.reference import turned_tail


def rotate_append_tail(call: RotateAppendTailCall) -> None:
    """Turns q in place and fills the slots."""
    cos, sin = call.cos_sin.index_select(0, call.positions).unsqueeze(2).unbind(1)
    tail = call.q[..., -call.turned :]
    tail.copy_(turned_tail(tail, cos, sin))
    keys = rms_norm(call.k, call.norm, call.eps, backend=Backend.REFERENCE)
    append_rows(turned_tail(keys.unsqueeze(1), cos, sin).squeeze(1), call.pages, call.slot_mapping)
