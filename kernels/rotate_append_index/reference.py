"""rotate_append_index in plain torch: norm, rotation, quantisation and append one after the other."""

from torch.nn import functional

from kernels.fp8 import quantise, token_scales
from kernels.rotate_append_index.call import RotateAppendIndexCall
from kernels.rotation.reference import rotated


def rotate_append_index(call: RotateAppendIndexCall) -> None:
    """Turns q in place and fills the slots."""
    cos, sin = call.cos_sin.index_select(0, call.positions).unsqueeze(2).unbind(1)
    call.q.copy_(rotated(call.q, cos, sin))
    normed = functional.layer_norm(
        call.k.float(), call.k.shape[-1:], call.norm.float(), call.bias.float(), call.eps
    ).to(call.k.dtype)
    keys = rotated(normed.unsqueeze(1), cos, sin)
    kept = call.slot_mapping >= 0
    slots = call.slot_mapping[kept]
    page, offset = slots // call.pages.shape[1], slots % call.pages.shape[1]
    if call.scales is None:
        call.pages[page, offset] = keys[kept, 0]
        return
    scales = token_scales(keys)
    call.scales[page, offset] = scales[kept, 0]
    call.pages[page, offset] = quantise(keys, scales.unsqueeze(-1))[kept, 0]
