"""Launches the kernel for few rows."""

import torch

from kernels.device import num_multiprocessors
from kernels.layout import KvLayout
from kernels.prefill_attention.call import PrefillCall
from kernels.prefill_attention.few_scratch import SLOTS, FewRows
from kernels.prefill_attention.hopper.few.kernel import attend_few
from kernels.softmax import LOG2_E

PROGRAMS_PER_MULTIPROCESSOR = 2
# Rows of an adder and its stages. 16 tokens behind 4,096 keys took an H200 38.8 us with 16 rows and 43.0 with 32.
ROWS, STAGES = 16, 4


def launch_few(
    call: PrefillCall,
    records: torch.Tensor,
    few: FewRows,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    slots: int = SLOTS,
) -> None:
    """Computes the tiles of a prepared plan. Fewer `slots` of the scratch mean more rounds (tests)."""
    q, spec, group = call.q, call.spec, call.spec.group
    strides = (q.stride(1), q.stride(0), q.stride(2))
    if q.dim() == 3:
        strides = (q.stride(0), group * q.stride(1), q.stride(1))
    with torch.cuda.device_of(out):
        attend_few[(PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors(out.device),)](
            q,
            call.k_pages,
            call.v_pages,
            out,
            lse if lse is not None else out,
            call.sinks if call.sinks is not None else out,
            call.block_tables,
            records,
            few.extent,
            *few.rows,
            few.weights(q.dtype),
            *few.states,
            few.counters,
            (spec.softcap or spec.scale) * LOG2_E,
            2.0 * LOG2_E * spec.scale / spec.softcap if spec.softcap else 0.0,
            out.shape[0],
            call.block_tables.stride(0),
            *(stride // 8 for stride in strides),
            out.stride(0),
            out.stride(1),
            call.k_pages.stride(0) // spec.row_elements,
            call.v_pages.stride(0) // spec.row_elements,
            slots,
            HEADS=spec.shape.heads,
            GQA_GROUP=group,
            D=spec.shape.dim,
            PAGE=spec.shape.page_tokens,
            HND=spec.layout is KvLayout.HND,
            CAP=spec.softcap > 0.0,
            WANTS_LSE=lse is not None,
            HAS_SINKS=call.sinks is not None,
            ROWS=ROWS,
            STAGES=STAGES,
            num_warps=4,
            # Only what is written as fma is one: arithmetic that is that of `attend_tiles` rounds alike.
            enable_fp_fusion=False,
            # Programs wait for each other: none starts before there is room for all.
            launch_cooperative_grid=True,
        )
