"""Launches mla_prefill's Gluon kernel: descriptors of queries, keys and values, and how many heads run side by side."""

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.mla_prefill.call import MlaPrefillCall
from kernels.mla_prefill.hopper.kernel import attend_ragged
from kernels.mla_prefill.plan import BLOCK, MlaPrefillPlan
from kernels.softmax import LOG2_E

STAGES = 2
# A section's keys and values should stay in the L2 cache while its tiles are worked on.
SECTION_BYTES = 8 << 20


def section_heads(heads: int, keys: int) -> int:
    """Returns how many heads are worked on side by side."""
    section = 1
    while heads % (2 * section) == 0 and 2 * section * keys * 512 <= SECTION_BYTES:
        section *= 2
    return section


def launch(call: MlaPrefillCall, plan: MlaPrefillPlan | None, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Launches over checked, non-empty arguments and a prepared plan (None: one of its own is made)."""
    q, k_nope, k_rope, v = call.q, call.k_nope, call.k_rope, call.v
    tokens, heads, _ = q.shape
    if plan is None:
        plan = MlaPrefillPlan(call.num_seqs, tokens, device=q.device)
        plan.prepare(call.cu_seqlens_q, call.cu_seqlens_k, call.q_offsets, causal=call.causal)
    acc, row_max, row_sum = call.state if call.state is not None else (plan.order, plan.order, plan.order)
    with torch.cuda.device(q.device):
        programs = torch.cuda.get_device_properties(q.device).multi_processor_count
        attend_ragged[(programs,)](
            _boxes(q, BLOCK // 2, 128),
            _boxes(q, BLOCK // 2, 64),
            _boxes(k_nope, BLOCK, 128),
            _boxes(k_rope, BLOCK, 64),
            _boxes(v, BLOCK, 128),
            out,
            lse if lse is not None else plan.order,
            acc,
            row_max,
            row_sum,
            plan.order,
            plan.counts,
            call.cu_seqlens_q,
            call.cu_seqlens_k,
            call.offsets_or_any,
            call.scale * LOG2_E,
            tokens,
            section_heads(heads, k_nope.shape[0]),
            q.stride(1),
            k_nope.stride(1),
            call.rope_head_stride,
            v.stride(1),
            HEADS=heads,
            BLOCK=BLOCK,
            STAGES=STAGES,
            MODE=call.mask_mode,
            RESUMES=call.resumes,
            SUSPENDS=call.suspends,
            WANTS_LSE=lse is not None,
            # Without it a launch of larger tiles is up to 5 % faster (H200).
            IDLES=call.max_seqlen_q <= BLOCK // 2,
            num_warps=4,
            launch_pdl=True,
            # Only what is written as fma is one: copies of the loop's arithmetic round alike.
            enable_fp_fusion=False,
        )


def _boxes(rows: torch.Tensor, box: int, width: int) -> TensorDescriptor:
    """A descriptor of boxes of `box` rows by `width` elements; the column selects the head."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    reach = 1 + sum((size - 1) * stride for size, stride in zip(rows.shape[1:], rows.stride()[1:], strict=True))
    return TensorDescriptor(rows, [rows.shape[0], reach], [rows.stride(0), 1], [box, width], layout)
