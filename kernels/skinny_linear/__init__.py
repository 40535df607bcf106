"""skinny_linear: a few rows times a large weight matrix, at the speed at which the weights can be read.

Does not know who the rows belong to: a row's bits are a function of that row and the weights alone. Each sum is one
chain in ascending K; whether that gives the bits of the library's GEMM is for the caller to find out on its shapes.
"""

import torch

from kernels._checks import check_contiguous, check_tensor
from kernels.backend import Backend, uses_triton
from kernels.errors import KernelArgumentError
from kernels.skinny_linear import reference

__all__ = ["MAX_ROWS", "fits_skinny", "skinny_linear"]

MAX_ROWS = 64
DTYPES = (torch.bfloat16, torch.float16)
# The copy engine's addresses go in multiples of 16 bytes.
ALIGNED_COLUMNS = 8


def fits_skinny(weight: torch.Tensor) -> bool:
    """Whether the kernel runs on this weight's device and can read it."""
    return (
        weight.is_cuda
        and torch.cuda.get_device_capability(weight.device)[0] == 9
        and weight.dtype in DTYPES
        and weight.is_contiguous()
        and weight.shape[1] % ALIGNED_COLUMNS == 0
        and weight.data_ptr() % 16 == 0
    )


def skinny_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, backend: Backend = Backend.AUTO
) -> torch.Tensor:
    """x [num_rows, K] times weight [N, K] transposed, plus bias [N]; at most MAX_ROWS rows, bf16 or fp16."""
    check_tensor("weight", weight, (None, None), DTYPES, x.device)
    check_contiguous("weight", weight)
    num_outputs, depth = weight.shape
    check_tensor("x", x, (None, depth), (weight.dtype,), x.device)
    _check_alignment(x, weight)
    if x.shape[0] > MAX_ROWS:
        raise KernelArgumentError(f"x: at most {MAX_ROWS} rows, got {x.shape[0]}")
    if bias is not None:
        check_tensor("bias", bias, (num_outputs,), (weight.dtype,), x.device)
        check_contiguous("bias", bias)
    out = x.new_empty(x.shape[0], num_outputs)
    if out.numel() and uses_triton(backend, x):
        from kernels.skinny_linear.kernel import launch

        launch(x, weight, bias, out)
    elif out.numel():
        reference.skinny_linear(x, weight, bias, out)
    return out


def _check_alignment(x: torch.Tensor, weight: torch.Tensor) -> None:
    depth = weight.shape[1]
    if depth == 0 or depth % ALIGNED_COLUMNS:
        raise KernelArgumentError(f"weight: columns must be a multiple of {ALIGNED_COLUMNS}, got {depth}")
    if weight.data_ptr() % 16:
        raise KernelArgumentError("weight: must be 16-byte aligned")
    if x.numel() and (x.stride(1) != 1 or x.stride(0) % ALIGNED_COLUMNS or x.data_ptr() % 16):
        raise KernelArgumentError(f"x: rows must be dense and 16-byte aligned, strides are {list(x.stride())}")
