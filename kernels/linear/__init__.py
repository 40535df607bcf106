"""linear: rows times a weight matrix, such that a row's bits depend on no other row and not on how many there are.

Two routes lead there on CUDA: the library's GEMM, which keeps a row's bits for most shapes while it has no workspace to
split K into (the process sees to that before cuBLAS starts), and a Triton GEMM: of one fixed tile for 16 bits, of
fixed slices of the depth for fp32. On Hopper up to 64 rows of 16 bits take a Gluon kernel on both routes. `keeps_rows`
finds out, on the weights' own device, whether library and Gluon kernel give the same bits, for rows that lie dense and
for parts of wider rows at multiples of 16 bytes. Rows at other places are made dense first: the library has other
kernels for them, which it picks by the number of rows. On a CPU fp32 weights are packed for oneDNN.
"""

from enum import Enum

import torch
from torch.nn import functional

from kernels._checks import KV_DTYPES, check_contiguous, check_dense, check_rows, check_tensor
from kernels.backend import Backend, uses_triton
from kernels.errors import KernelArgumentError
from kernels.linear import hopper, packed, reference

__all__ = ["LEAST_PACKED_ROWS", "LEAST_ROWS", "Route", "keeps_rows", "linear", "packed_weight"]

# The library takes other kernels, with another order of sums, for fewer rows.
LEAST_ROWS = 8
LEAST_PACKED_ROWS = packed.LEAST_ROWS
# The library picks a kernel by how far apart rows begin, too: at multiples of this or not.
ALIGNED_BYTES = 16
# Numbers of rows on both sides of where the library changes its tiles.
ROWS_TO_TRY = (LEAST_ROWS, 9, 16, 17, 32, 48, 64, 65, 100, 128, 200, 256, 384, 512, 777, 1024, 2048)

# A weight matrix of more elements than this is tried with random numbers alone: its products have millions of elements,
# of which some differ if the order of sums does, and the second trial would need a matrix of the same size.
MANY_WEIGHTS = 1 << 24


class Route(Enum):
    """LIBRARY multiplies with torch's GEMM, TILED with the Triton kernels of fixed tiles or slices."""

    LIBRARY = "library"
    TILED = "tiled"


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    route: Route = Route.LIBRARY,
    backend: Backend = Backend.AUTO,
) -> torch.Tensor:
    """x [num_rows, K] times weight [N, K] transposed, plus bias [N]. On CUDA fewer than LEAST_ROWS rows are padded.

    x has the weight's dtype, or 16 bits where the weight is fp32, which gives the bits of x.float().
    On Hopper the weight may be read before earlier launches have ended, so none of them may write it. A weight that
    `packed_weight` returned takes the CPU's route, whatever `route` and `backend` say.
    """
    check_tensor("weight", weight, (None, None), KV_DTYPES, x.device)
    if not weight.is_mkldnn:
        check_contiguous("weight", weight)
    dtypes = KV_DTYPES if weight.dtype is torch.float32 else (weight.dtype,)
    check_tensor("x", x, (None, weight.shape[1]), dtypes, x.device)
    check_rows("x", x)
    if bias is not None:
        check_dense("bias", bias, (weight.shape[0],), (weight.dtype,), x.device)
    if weight.is_mkldnn:
        return packed.linear(x.float(), weight, bias)
    if backend is Backend.REFERENCE:
        return reference.linear(x.to(weight.dtype), weight, bias)
    if backend in (Backend.AUTO, Backend.GLUON):
        reason = hopper.reason_against(x, weight)
        if reason is None:
            return _few(x, weight, bias)
        if backend is Backend.GLUON:
            raise KernelArgumentError(f"backend GLUON: {reason}")
    if route is Route.TILED and uses_triton(backend, x):
        return _tiled(x, weight, bias)
    x = x.to(weight.dtype)
    missing = LEAST_ROWS - x.shape[0]
    if x.is_cuda and LEAST_ROWS > missing > 0:
        return functional.linear(functional.pad(x, (0, 0, 0, missing)), weight, bias)[: x.shape[0]]
    return functional.linear(as_tried(x) if x.is_cuda else x, weight, bias)


def as_tried(x: torch.Tensor) -> torch.Tensor:
    """Returns rows as `keeps_rows` tries them: x itself where it is dense or its rows begin at multiples of
    ALIGNED_BYTES, else a dense copy."""
    is_aligned = x.data_ptr() % ALIGNED_BYTES == 0 and x.stride(0) * x.element_size() % ALIGNED_BYTES == 0
    return x if is_aligned else x.contiguous()


def _few(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    from kernels.linear.hopper.launch import launch

    out = x.new_empty(x.shape[0], weight.shape[0])
    launch(x, weight, bias, out)
    return out


def _tiled(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    from kernels.linear import triton
    from kernels.linear.fp32 import triton as fp32

    out = weight.new_empty(x.shape[0], weight.shape[0])
    if out.numel():
        (fp32 if weight.dtype is torch.float32 else triton).launch(x, weight, bias, out)
    return out


def packed_weight(weight: torch.Tensor, backend: Backend = Backend.AUTO) -> torch.Tensor:
    """Returns the weight as `linear` takes it best: packed for fp32 on a CPU, itself on CUDA and for other backends."""
    return packed.pack(weight) if backend is Backend.AUTO and packed.can_pack(weight) else weight


def keeps_rows(weight: torch.Tensor, bias: torch.Tensor | None, max_rows: int) -> bool:
    """Returns whether the LIBRARY route gives a row the same bits in all launches of up to max_rows rows.

    Tried on random rows, dense forwards and as parts of wider rows backwards, which waits for the device: for the start
    of a process. Two orders of sums round nearly all elements to the same number. So small weights are tried a second
    time, with numbers whose exact sums are zero: the result is then the rounding error, which differs with the order.
    """
    counts = sorted({rows for rows in ROWS_TO_TRY if rows < max_rows} | {max(max_rows, LEAST_ROWS)})
    generator = torch.Generator(weight.device).manual_seed(0)
    x = _random(counts[-1], weight.shape[1], weight, generator)
    if not _keeps(x, weight, bias, counts):
        return False
    if weight.numel() > MANY_WEIGHTS:
        return True
    # Added to a bias, the rounding error would be rounded away.
    no_bias = None if bias is None else torch.zeros_like(bias)
    return _keeps(*_cancelling(x, weight, generator), no_bias, counts)


def _keeps(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, counts: list[int]) -> bool:
    most = linear(x, weight, bias)
    return all(
        torch.equal(linear(x[:rows], weight, bias), most[:rows])
        and torch.equal(linear(_parts_of_wider(x[:rows].flip(0)), weight, bias).flip(0), most[:rows])
        for rows in counts
    )


def _cancelling(x: torch.Tensor, weight: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns rows and weights of these shapes whose exact products are zero: each term has an equal one of opposite
    sign."""
    order = torch.randperm(weight.shape[1], generator=generator, device=weight.device)
    half = weight.shape[1] // 2
    one, other = order[:half], order[half : 2 * half]
    rows, weights = x.clone(), _random(weight.shape[0], weight.shape[1], weight, generator)
    rows[:, order[2 * half :]] = 0.0
    rows[:, other], weights[:, other] = -rows[:, one], weights[:, one]
    return rows, weights


def _random(num_rows: int, num_columns: int, like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.randn((num_rows, num_columns), generator=generator, device=like.device).to(like.dtype)


def _parts_of_wider(x: torch.Tensor) -> torch.Tensor:
    """Returns the rows as slices of wider ones, which begin at multiples of ALIGNED_BYTES."""
    step = ALIGNED_BYTES // x.element_size()
    return x.new_empty(x.shape[0], (x.shape[1] // step + 2) * step)[:, : x.shape[1]].copy_(x)
