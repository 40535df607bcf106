"""mla_decode for sm_90: asynchronous copies and wgmma, written in Gluon, behind a launcher that says what it can do.

Knows no op but its own; Gluon has no interpreter, so its twin in `mla_decode.triton` is what a CPU tests.
"""

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.mla_decode.hopper.few_kernel import attend_latents_few
from kernels.mla_decode.hopper.fold import fold
from kernels.mla_decode.hopper.kernel import attend_latents
from kernels.mla_decode.plan import MlaDecodePlan
from kernels.softmax import LOG2_E

__all__ = ["attend", "can_attend"]

WIDTH = 576
PAGE_SIZES = (8, 16, 32, 64, 128, 256)
TILE, STAGES = 64, 2
# With two groups of warps the compiler would give a thread 256 at entry, one more than there are.
ENTRY_REGISTERS = 168


def can_attend(q: torch.Tensor, pages: torch.Tensor) -> bool:
    """Whether copies can follow these pages: 8 to 256 rows of 576 bf16, whole rows apart, on a Hopper card."""
    return (
        q.is_cuda
        and torch.cuda.get_device_capability(q.device) == (9, 0)
        and q.dtype is torch.bfloat16
        and pages.shape[1] in PAGE_SIZES
        and pages.stride(0) % WIDTH == 0
        and pages.data_ptr() % 16 == 0
        and q.data_ptr() % 16 == 0
        and pages.shape[0] * (pages.stride(0) // WIDTH) < 2**31
    )


def attend(
    q: torch.Tensor,
    pages: torch.Tensor,
    block_tables: torch.Tensor,
    several: bool,
    plan: MlaDecodePlan,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Attends over checked, non-empty arguments by a plan of their lengths; `several`: with cu_seqlens_q."""
    tokens, heads, _ = q.shape
    page_tokens, page_rows = pages.shape[1], pages.stride(0) // WIDTH
    box = min(page_tokens, TILE)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    rows = (pages.shape[0] - 1) * page_rows + page_tokens

    def boxes(tensor: torch.Tensor, count: int, height: int, width: int) -> TensorDescriptor:
        return TensorDescriptor(tensor, [count, WIDTH], [WIDTH, 1], [height, width], layout)

    if plan.few:
        kernel, options = attend_latents_few, {"GROUP": plan.tree.group, "maxnreg": ENTRY_REGISTERS}
    else:
        kernel, options = attend_latents, {"MULTI": several, "SLOT_ROWS": plan.slot_rows}
    with torch.cuda.device(q.device):
        kernel[(plan.programs,)](
            boxes(q, tokens * heads, plan.rows, 256),
            boxes(q, tokens * heads, plan.rows, 64),
            boxes(pages, rows, box, 256),
            boxes(pages, rows, box, 64),
            out,
            lse if lse is not None else plan.peak,
            plan.acc,
            plan.peak,
            plan.total,
            plan.sums,
            plan.items,
            plan.counts,
            block_tables,
            scale * LOG2_E,
            tokens,
            page_rows,
            block_tables.stride(0),
            HEADS=heads,
            PAGE=page_tokens,
            LEAF=plan.tree.leaf,
            TILE=TILE,
            STAGES=STAGES,
            WANTS_LSE=lse is not None,
            num_warps=4,
            **options,
        )
        fold(plan, block_tables.shape[0], out, lse)
