"""mamba2_scan: near the recurrence in fp64, and the same bits wherever a row is cut on the grid, and in any batch."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from kernels.block_scan import plan_scan
from kernels.errors import KernelArgumentError
from kernels.mamba2_scan import Mamba2Steps, mamba2_scan
from kernels.state_slots import StateSlots
from tests.kernels.conftest import INTERPRETING, rarely_interpreted
from tests.kernels.recurrences import Step, mamba2
from tests.kernels.scans import (
    Scan,
    check_company_with_two_threads,
    check_cuts_off_the_grid,
    check_cuts_on_the_grid,
    check_rows_of_every_kind,
)
from tests.kernels.state_inputs import (
    StateRow,
    begins,
    keys,
    make_slots,
    placed,
)
from tests.kernels.target import Target

# Of the largest output or state; 16 bits round factors of products. Decays are exponentials of differences of sums that
# reach 200 here, where fp32 has steps of 1.5e-5: an H200, which adds them up in another order, was off by 1.8e-5.
TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


class Heads(NamedTuple):
    """Groups, heads, and sizes of a head and of what it remembers; what else a layer has."""

    groups: int = 2
    heads: int = 4
    dim: int = 24
    d_state: int = 32
    has_all: bool = True

    @property
    def state(self) -> tuple[int, int, int]:
        return self.heads, self.dim, self.d_state


class Layer(NamedTuple):
    """A layer's inputs for some tokens, and its weights."""

    x: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor
    raw: torch.Tensor
    gate: torch.Tensor
    sizes: Heads

    def part(self, first: int, end: int) -> Layer:
        return Layer(*(tensor[first:end] for tensor in self[:5]), self.sizes)

    def beside(self, *others: Layer) -> Layer:
        pairs = zip(self[:5], *(other[:5] for other in others), strict=True)
        return Layer(*(torch.cat(tensors) for tensors in pairs), self.sizes)

    def steps(self, device: str = "cpu") -> Mamba2Steps:
        heads = self.sizes.heads
        a = -torch.linspace(0.01, 4.0, heads, device=device)
        bias = torch.linspace(-3.0, 1.0, heads, device=device)
        raw = self.raw.to(device)
        return Mamba2Steps(raw, bias, a, 0.001, 20.0) if self.sizes.has_all else Mamba2Steps(raw, None, a)

    def skip(self, device: str = "cpu") -> torch.Tensor | None:
        return torch.linspace(-1.0, 2.0, self.sizes.heads, device=device) if self.sizes.has_all else None

    def optional_gate(self, device: str = "cpu") -> torch.Tensor | None:
        return self.gate.to(device) if self.sizes.has_all else None


def layer(tokens: int, sizes: Heads, dtype: torch.dtype, seed: int = 2) -> Layer:
    """Some tokens make steps of nearly nothing, some very large ones."""
    generator = torch.Generator().manual_seed(seed)

    def made(*size: int) -> torch.Tensor:
        return torch.randn((tokens, *size), generator=generator)

    raw = made(sizes.heads)
    raw[3::17], raw[5::11] = 25.0, -40.0
    x, b, c = made(sizes.heads, sizes.dim), made(sizes.groups, sizes.d_state), made(sizes.groups, sizes.d_state)
    gate = made(sizes.heads, sizes.dim)
    return Layer(x.to(dtype), b.to(dtype), c.to(dtype), raw, gate.to(dtype), sizes)


def scanned(
    given: Layer, first: list[int], rows: list[StateRow], pool: torch.Tensor, slots: StateSlots, target: Target
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the outputs and the pool afterwards, on the CPU; `pool` stays as it is."""
    device, cu = target.device, begins(rows)
    states = pool.to(device).clone()
    lengths = (cu.to(device), keys(first, rows).to(device))
    plan = plan_scan(*lengths, placed(slots, device), given.x.shape[0], backend=target.backend)
    out = mamba2_scan(
        given.x.to(device), given.b.to(device), given.c.to(device), given.steps(device), states, plan,
        skip=given.skip(device), gate=given.optional_gate(device), backend=target.backend,
    )  # fmt: skip
    return out.cpu(), states.cpu()


def truth(given: Layer, sizes: Heads) -> Step:
    return mamba2(given.x, given.b, given.c, given.steps(), given.skip(), given.optional_gate())


SCAN = Scan(layer, scanned, truth)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, rarely_interpreted(torch.float16)], ids=str)
@pytest.mark.parametrize("sizes", [Heads(), Heads(1, 3, 16, 64, False), Heads(2, 2, 40, 72)], ids=str)
def test_rows_of_every_kind(target: Target, sizes: Heads, dtype: torch.dtype) -> None:
    check_rows_of_every_kind(SCAN, target, sizes, (sizes.heads, sizes.dim), dtype, TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("dtype", "is_restored"),
    [
        (torch.float32, True), (torch.bfloat16, False), rarely_interpreted(torch.float32, False),
        rarely_interpreted(torch.bfloat16, True),
    ],
    ids=str,
)  # fmt: skip
def test_no_cut_on_the_grid_and_no_company_changes_a_bit(target: Target, dtype: torch.dtype, is_restored: bool) -> None:
    check_cuts_on_the_grid(SCAN, target, Heads(), dtype, is_restored)


def test_cuts_off_the_grid_agree_to_within_rounding(target: Target) -> None:
    check_cuts_off_the_grid(SCAN, target, Heads(), is_relative=True)


@pytest.mark.skipif(INTERPRETING, reason="a CPU's own route")
def test_company_changes_no_bit_with_two_threads() -> None:
    check_company_with_two_threads(SCAN, Heads(1, 8, 64, 64))


ROWS = [StateRow(4), StateRow(2)]
SLOTS, COUNT = make_slots(ROWS)
GIVEN, POOL = layer(6, Heads(), torch.float32), torch.zeros(COUNT, *Heads().state)
STEPS, PLAN = GIVEN.steps(), plan_scan(begins(ROWS), begins(ROWS), SLOTS, 6)
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"x": GIVEN.x[:, 0]}, r"x: shape must be \[any, any, any\]"),
    ({"b": GIVEN.b.half()}, "b: dtype must be one of"),
    ({"b": GIVEN.x[:, :3]}, "b: its groups must divide 4 heads, got 3"),
    ({"b": torch.zeros(6, 2, 260)}, r"b: heads must have 1 to 256 elements, states are of \[260, 24\]"),
    ({"c": GIVEN.c[:, :1]}, r"c: shape must be \[6, 2, 32\], got \[6, 1, 32\]"),
    ({"gate": GIVEN.gate[:5]}, r"gate: shape must be \[6, 4, 24\], got \[5, 4, 24\]"),
    ({"steps": STEPS._replace(raw=STEPS.raw[:5])}, r"steps.raw: shape must be \[6, 4\], got \[5, 4\]"),
    ({"steps": STEPS._replace(a=STEPS.a.bfloat16())}, "steps.a: dtype must be one of"),
    ({"steps": STEPS._replace(bias=STEPS.a[:2])}, r"steps.bias: shape must be \[4\], got \[2\]"),
    ({"steps": STEPS._replace(least=3.0, most=2.0)}, "steps: limits must be 0 or more, in order, got 3.0 and 2.0"),
    ({"skip": STEPS.a.half()}, "skip: dtype must be one of"),
    ({"states": POOL.bfloat16()}, "states: dtype must be one of"),
    ({"states": POOL.transpose(2, 3)}, r"states: shape must be \[any, 4, 24, 32\]"),
    ({"plan": plan_scan(begins(ROWS), begins(ROWS), SLOTS, 0)}, "plan: has 0 blocks"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_wrong_arguments_are_named(change: dict[str, Any], message: str) -> None:
    given = {"x": GIVEN.x, "b": GIVEN.b, "c": GIVEN.c, "steps": STEPS, "states": POOL, "plan": PLAN}
    with pytest.raises(KernelArgumentError, match=message):
        mamba2_scan(**{**given, **change})
