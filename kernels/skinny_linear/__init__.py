"""skinny_linear: a few rows times a large weight matrix, at the speed at which the weights can be read.

Does not know who the rows belong to: a row's bits are a function of that row and the weights alone, whatever the number
of rows and whoever its neighbours are.
"""

import torch

from kernels._checks import check_contiguous, check_disjoint, check_tensor
from kernels.backend import Backend, uses_triton
from kernels.errors import KernelArgumentError
from kernels.skinny_linear import reference

__all__ = ["MAX_ROWS", "SkinnyPlan", "fits_skinny", "skinny_linear"]

MAX_ROWS = 64
DTYPES = (torch.bfloat16, torch.float16)
OUTPUTS_PER_PROGRAM = 64
COLUMNS_PER_STEP = 128
# Columns of K that one program adds up: enough programs to fill the card, few enough parts to merge.
PART_COLUMNS = 1024
# Two programs fit on a multiprocessor: while one starts or merges, the other reads.
STAGES = 5
WIDE_STAGES = 4


class SkinnyPlan:
    """The counters by which the last part of a tile knows itself; zero between launches, so graphs can replay."""

    def __init__(self, max_outputs: int, device: torch.device) -> None:
        self.max_outputs = max_outputs
        self.counters = torch.zeros(-(-max_outputs // OUTPUTS_PER_PROGRAM), dtype=torch.int32, device=device)


def fits_skinny(weight: torch.Tensor) -> bool:
    """Whether the kernel can read this weight matrix."""
    return weight.dtype in DTYPES and weight.shape[1] % COLUMNS_PER_STEP == 0 and weight.is_contiguous()


def stages_for(rows: int) -> int:
    """Depth of the ring for a kernel of so many rows; rows of x ride in it beside the weights."""
    return STAGES if rows <= MAX_ROWS // 2 else WIDE_STAGES


def skinny_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    plan: SkinnyPlan,
    out: torch.Tensor | None = None,
    backend: Backend = Backend.AUTO,
) -> torch.Tensor:
    """x [num_rows, K] times weight [N, K] transposed, plus bias [N]; at most MAX_ROWS rows, bf16 or fp16.

    Launches that share a plan must follow each other on one stream.
    """
    _check(x, weight, bias, plan)
    if out is None:
        out = x.new_empty(x.shape[0], weight.shape[0])
    check_tensor("out", out, (x.shape[0], weight.shape[0]), (x.dtype,), x.device)
    if out.numel() and out.stride(1) != 1:
        raise KernelArgumentError(f"out: the last axis must have stride 1, strides are {list(out.stride())}")
    for name, source in (("x", x), ("weight", weight), ("bias", bias)):
        if source is not None:
            check_disjoint("out", out, name, source)
    if out.numel() == 0:
        return out
    if uses_triton(backend, x):
        from kernels.skinny_linear.kernel import launch

        rows = max(8, 1 << (x.shape[0] - 1).bit_length())
        launch(x, weight, bias, plan.counters, out, PART_COLUMNS, rows, stages_for(rows))
    else:
        reference.skinny_linear(x, weight, bias, out)
    return out


def _check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, plan: SkinnyPlan) -> None:
    check_tensor("weight", weight, (None, None), DTYPES, x.device)
    check_contiguous("weight", weight)
    outputs, depth = weight.shape
    check_tensor("x", x, (None, depth), (weight.dtype,), x.device)
    if x.shape[0] > MAX_ROWS:
        raise KernelArgumentError(f"x: at most {MAX_ROWS} rows, got {x.shape[0]}")
    if depth == 0 or depth % COLUMNS_PER_STEP:
        raise KernelArgumentError(f"weight: columns must be a multiple of {COLUMNS_PER_STEP}, got {depth}")
    # What the copy engine reads must start, and go from row to row, in multiples of 16 bytes.
    if x.numel() and (x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16):
        raise KernelArgumentError(f"x: rows must be dense and 16-byte aligned, strides are {list(x.stride())}")
    if weight.data_ptr() % 16:
        raise KernelArgumentError("weight: must be 16-byte aligned")
    if bias is not None:
        check_tensor("bias", bias, (outputs,), (weight.dtype,), x.device)
        check_contiguous("bias", bias)
    if plan.max_outputs < outputs or plan.counters.device != x.device:
        raise KernelArgumentError(
            f"plan: made for {plan.max_outputs} outputs on {plan.counters.device}, got {outputs} on {x.device}"
        )
