"""linear: rows times a weight matrix, such that a row's bits depend on no other row and not on how many there are.

Does not know the model. Two routes lead there on CUDA: the library's GEMM, which keeps a row's bits for most shapes
while it has no workspace to split K into (the process sees to that before cuBLAS starts), and a Triton GEMM of one
fixed tile. `unstable_shapes` finds out, on the weights' own device, for which shapes the first one will not do.
"""

from collections.abc import Iterable
from enum import Enum

import torch
from torch.nn import functional

from kernels._checks import KV_DTYPES, check_contiguous, check_disjoint, check_rows, check_tensor
from kernels.backend import Backend, uses_triton
from kernels.errors import KernelArgumentError
from kernels.linear import reference

__all__ = ["LEAST_ROWS", "Route", "linear", "unstable_shapes"]

# The library takes other kernels, with another order of sums, for fewer rows.
LEAST_ROWS = 8
# Numbers of rows on both sides of where the library changes its tiles.
ROWS_TO_TRY = (LEAST_ROWS, 9, 16, 17, 32, 48, 64, 65, 100, 128, 200, 256, 384, 512, 777, 1024, 2048)


class Route(Enum):
    """LIBRARY multiplies with torch's GEMM, TILED with the Triton kernel of one tile."""

    LIBRARY = "library"
    TILED = "tiled"


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    route: Route = Route.LIBRARY,
    out: torch.Tensor | None = None,
    backend: Backend = Backend.AUTO,
) -> torch.Tensor:
    """x [num_rows, K] times weight [N, K] transposed, plus bias [N]. On CUDA fewer than LEAST_ROWS rows are padded."""
    check_tensor("weight", weight, (None, None), KV_DTYPES, x.device)
    check_contiguous("weight", weight)
    check_tensor("x", x, (None, weight.shape[1]), (weight.dtype,), x.device)
    check_rows("x", x)
    if bias is not None:
        check_tensor("bias", bias, (weight.shape[0],), (weight.dtype,), x.device)
    if out is not None:
        _check_out(out, x, weight, bias)
    if route is Route.TILED and uses_triton(backend, x):
        from kernels.linear.kernel import launch

        out = x.new_empty(x.shape[0], weight.shape[0]) if out is None else out
        if out.numel():
            launch(x, weight, bias, out)
        return out
    if backend is Backend.REFERENCE:
        return _into(out, reference.linear(x, weight, bias))
    if x.is_cuda and 0 < x.shape[0] < LEAST_ROWS:
        padded = functional.linear(functional.pad(x, (0, 0, 0, LEAST_ROWS - x.shape[0])), weight, bias)
        return _into(out, padded[: x.shape[0]])
    if out is None:
        return functional.linear(x, weight, bias)
    return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)


def unstable_shapes(weights: Iterable[torch.Tensor], max_rows: int) -> frozenset[tuple[int, int]]:
    """Shapes [N, K] for which the library gives a row other bits in another launch; tried up to max_rows rows.

    Waits for the device: for the start of a process. One weight of each shape and dtype is tried.
    """
    tried = {(tuple(weight.shape), weight.dtype): weight for weight in weights}
    return frozenset(
        (weight.shape[0], weight.shape[1])
        for weight in tried.values()
        if weight.is_cuda and not _keeps_rows(weight, max_rows)
    )


def _keeps_rows(weight: torch.Tensor, max_rows: int) -> bool:
    """Whether leading rows, and the same rows behind other neighbours, come out as they do among the most rows."""
    counts = sorted({rows for rows in ROWS_TO_TRY if rows < max_rows} | {max(max_rows, LEAST_ROWS)})
    generator = torch.Generator(weight.device).manual_seed(0)
    x = torch.randn((counts[-1], weight.shape[1]), generator=generator, device=weight.device).to(weight.dtype)
    most = linear(x, weight)
    for rows in counts:
        if not torch.equal(linear(x[:rows], weight), most[:rows]):
            return False
        if not torch.equal(linear(x[:rows].flip(0), weight).flip(0), most[:rows]):
            return False
    return True


def _into(out: torch.Tensor | None, product: torch.Tensor) -> torch.Tensor:
    return product if out is None else out.copy_(product)


def _check_out(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    check_tensor("out", out, (x.shape[0], weight.shape[0]), (x.dtype,), x.device)
    if out.numel() and out.stride(1) != 1:
        raise KernelArgumentError(f"out: the last axis must have stride 1, strides are {list(out.stride())}")
    for name, source in (("x", x), ("weight", weight), ("bias", bias)):
        if source is not None:
            check_disjoint("out", out, name, source)
