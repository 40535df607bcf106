"""rotate_append_kv in plain torch: norm, rotation and append one after the other."""

import torch
from torch.nn import functional

from kernels.fp8 import Scales
from kernels.fp8.reference import write_rows
from kernels.layout import KvLayout, PageShape
from kernels.rotate_append_kv.parts import HeadNorms, Rotary
from kernels.rotation.reference import rotated


def rotate_append_kv(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    rotary: Rotary,
    norms: HeadNorms | None,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    scales: Scales | None,
    shape: PageShape,
    layout: KvLayout,
    out: torch.Tensor,
    packed_out: torch.Tensor,
    num_unpacked: int,
) -> None:
    """Fills the slots, out and packed_out."""
    qk, v = qkv[:, : -shape.heads], qkv[:, -shape.heads :]
    q_heads = qk.shape[1] - shape.heads
    if norms is not None:
        # Of 16-bit rows and fp32 weights the rows are made wider, which rounds nothing.
        wide = qk.to(norms.q.dtype)
        q = functional.rms_norm(wide[:, :q_heads], norms.q.shape, norms.q, norms.eps)
        k = functional.rms_norm(wide[:, q_heads:], norms.k.shape, norms.k, norms.eps)
        qk = torch.cat((q, k), dim=1).to(qkv.dtype)
    cos, sin = rotary.cos_sin.index_select(0, positions).unsqueeze(2).unbind(1)
    # Queries and keys in one: on a CPU a short batch costs as much as it has calls of torch.
    qk = rotated(qk, cos, sin)
    q, k = qk[:, :q_heads], qk[:, q_heads:]
    kept = (slot_mapping >= 0).nonzero().squeeze(1)
    if kept.numel() != slot_mapping.numel():
        k, v, slot_mapping = k[kept], v[kept], slot_mapping[kept]
    write_rows(k, v, k_pages, v_pages, slot_mapping, scales, layout)
    out[:num_unpacked] = q[:num_unpacked]
    packed_out.copy_(q[num_unpacked:].view(-1, packed_out.shape[0], packed_out.shape[2], shape.dim).transpose(0, 1))
