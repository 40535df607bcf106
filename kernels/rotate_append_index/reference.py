"""rotate_append_index in plain torch: norm, rotation, quantisation and append one after the other."""

import torch
from torch.nn import functional

from kernels.fp8 import quantise, saturate, token_scales
from kernels.rotate_append_index.call import IndexQueries, RotateAppendIndexCall
from kernels.rotation.reference import rotated


def rotate_append_index(call: RotateAppendIndexCall, queries: IndexQueries) -> None:
    """Fills the queries, which are the call's own where keys are not fp8, and the slots."""
    cos, sin = call.cos_sin.index_select(0, call.positions).unsqueeze(2).unbind(1)
    turned = rotated(call.q, cos, sin)
    if call.scales is None:
        queries.q.copy_(turned)
    else:
        scales = token_scales(turned)
        # As the product with a reciprocal, which a kernel makes faster than a quotient.
        queries.q.copy_(saturate(turned.float() * scales.reciprocal().unsqueeze(-1)))
        torch.mul(call.weights, scales, out=queries.weights)
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
