"""What a measurement of a kernel op is: the work, its check, what bounds it, and other ways to do the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kernels.backend import Backend
from tests.kernels.inputs import CaseShape

# The heads of an 8B model, whose cases most ops are measured with.
SHAPE = CaseShape(page_tokens=16, q_heads=32, kv_heads=8, dim=128, dtype=torch.bfloat16, device="cuda")
TOKEN_BYTES = 2 * SHAPE.kv_heads * SHAPE.dim * SHAPE.dtype.itemsize
# Of an attention's rows; bf16 gives 0.3 to 0.6 %, and an answer of zeros 100 %, however long the context.
OUT_TOLERANCE = 2e-2
# bf16's step at 8: a norm may sum in another order, and the largest values are that large.
ROUNDING = 2.0**-4


class Ceiling(NamedTuple):
    """The figure of the card that an op cannot pass, empty where none of them bounds it; and the unit of both."""

    name: str
    unit: str


COPY, READ = Ceiling("copy_gb_per_s", "GB/s"), Ceiling("read_gb_per_s", "GB/s")
GEMM = Ceiling("gemm_bf16_tflops", "TFLOP/s")
LINK, FP32 = Ceiling("", "GB/s"), Ceiling("", "TFLOP/s")
TOKENS = Ceiling("", "ktoken/s")

Work = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Peer:
    """Another way to do the work; `amount` where it is not the same amount."""

    name: str
    run: Work
    amount: float


@dataclass(frozen=True, slots=True)
class Measurement:
    """One op on one input. `error` runs the op and compares; `amount` over seconds gives the ceiling's unit.

    `beside` is what `run` and the peers do besides the op; its time is taken off theirs.
    """

    op: str
    case: str
    amount: float
    run: Work
    error: Callable[[], float]
    tolerance: float = 0.0
    peers: tuple[Peer, ...] = ()
    ceiling: Ceiling = COPY
    beside: Work | None = None


Maker = Callable[[], list[Measurement]]


def against_reference(
    op: str,
    case: str,
    amount: float,
    call: Callable[..., torch.Tensor],
    ceiling: Ceiling,
    peers: tuple[Peer, ...] = (),
) -> list[Measurement]:
    """Returns the measurement of `call`, which takes a Backend; its rows are held against the reference's."""

    def error() -> float:
        return row_error(call(), call(Backend.REFERENCE))

    return [Measurement(op, case, amount, call, error, OUT_TOLERANCE, peers, ceiling)]


def random(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(size, dtype=dtype, device="cuda")


def difference(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest absolute error; infinite where a value is not finite."""
    worst = (got.float() - wanted.float()).abs().max()
    return float(worst) if bool(torch.isfinite(worst)) else float("inf")


def row_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The worst row's error over that row's own size, both as roots of sums of squares; infinite where not finite.

    Absolute errors say little of attention: the longer the context, the smaller its rows.
    """
    size = wanted.float().norm(dim=-1)
    worst = ((got.float() - wanted.float()).norm(dim=-1) / size.clamp_min(1e-20)).max()
    return float(worst) if bool(torch.isfinite(worst)) else float("inf")


def unequal(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """0 when every byte agrees, else 1."""
    return 0.0 if torch.equal(got.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8)) else 1.0
