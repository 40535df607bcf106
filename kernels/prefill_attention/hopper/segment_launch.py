"""Launches the Gluon kernel that attends by segments of keys."""

import torch

from kernels.device import num_multiprocessors
from kernels.prefill_attention.call import PrefillCall
from kernels.prefill_attention.hopper.launch import constants, numbers, own_plan, tensors
from kernels.prefill_attention.hopper.segment_kernel import attend_pieces
from kernels.prefill_attention.plan import PrefillPlan


def launch(call: PrefillCall, plan: PrefillPlan | None, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Launches over checked, non-empty arguments and a prepared plan with units (None: one of its own is made)."""
    plan = plan or own_plan(call, out)
    shape, units = call.spec.shape, plan.units
    assert units is not None
    # How many pieces there are is known on the device; here, how many there can be at most.
    segments = -(-call.block_tables.shape[1] * shape.page_tokens // call.segment_tokens)
    num_programs = min(num_multiprocessors(out.device), plan.records.shape[0] * shape.heads * segments)
    with torch.cuda.device_of(out):
        attend_pieces[(num_programs,)](
            *tensors(call, out, lse),
            plan.records,
            units.records,
            plan.count,
            units.count,
            units.arrivals,
            *units.states,
            *numbers(call, out),
            **constants(call, lse),
            SEGMENT=call.segment_tokens,
        )
