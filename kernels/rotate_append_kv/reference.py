"""rotate_append_kv in plain torch: norm, rotation and append one after the other."""

import torch
from torch.nn import functional

from kernels.fp8.reference import write_rows
from kernels.rotate_append_kv.call import RotateAppendCall
from kernels.rotation.reference import rotated


def rotate_append_kv(call: RotateAppendCall) -> None:
    """Fills the slots, out and packed_out."""
    qkv, norms, shape, slot_mapping = call.qkv, call.norms, call.shape, call.slot_mapping
    packed_out, num_unpacked = call.packed_out, call.num_unpacked
    qk, v = qkv[:, : -shape.heads], qkv[:, -shape.heads :]
    q_heads = qk.shape[1] - shape.heads
    if norms is not None:
        # Of 16-bit rows and fp32 weights the rows are made wider, which rounds nothing.
        wide = qk.to(norms.q.dtype)
        q = functional.rms_norm(wide[:, :q_heads], norms.q.shape, norms.q, norms.eps)
        k = functional.rms_norm(wide[:, q_heads:], norms.k.shape, norms.k, norms.eps)
        qk = torch.cat((q, k), dim=1).to(qkv.dtype)
    cos, sin = call.rotary.cos_sin.index_select(0, call.positions).unsqueeze(2).unbind(1)
    # Queries and keys in one: on a CPU a short batch costs as much as it has calls of torch.
    qk = rotated(qk, cos, sin)
    q, k = qk[:, :q_heads], qk[:, q_heads:]
    kept = (slot_mapping >= 0).nonzero().squeeze(1)
    if kept.numel() != slot_mapping.numel():
        k, v, slot_mapping = k[kept], v[kept], slot_mapping[kept]
    write_rows(k, v, call.k_pages, call.v_pages, slot_mapping, call.scales, call.layout)
    call.out[:num_unpacked] = q[:num_unpacked]
    packed_out.copy_(q[num_unpacked:].view(-1, packed_out.shape[0], packed_out.shape[2], shape.dim).transpose(0, 1))
