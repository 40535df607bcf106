"""mamba2_scan: near the recurrence in fp64, and the same bits wherever a row is cut on the grid, and in any company."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from kernels.backend import Backend
from kernels.block_scan import plan_scan
from kernels.errors import KernelArgumentError
from kernels.mamba2_scan import Mamba2Steps, mamba2_scan
from kernels.state_slots import StateSlots
from tests.kernels.compare import assert_same_bits
from tests.kernels.conftest import INTERPRETING
from tests.kernels.recurrences import assert_states, expected, mamba2
from tests.kernels.state_inputs import (
    POISON,
    SCANNED,
    Begin,
    StateRow,
    begins,
    keys,
    make_pool,
    make_slots,
    placed,
    sources,
)
from tests.kernels.target import Target

# Of the largest output or state; 16 bits round factors of products. Decays are exponentials of differences of sums that
# reach 200 here, where fp32 has steps of 1.5e-5: an H200, which adds them up in another order, was off by 1.8e-5.
TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
CPU = Target("cpu", Backend.AUTO)


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


def on_cpu_too(target: Target) -> list[Target]:
    """Beside the reference what a CPU takes by itself."""
    return [target, CPU] if target.backend is Backend.REFERENCE else [target]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("sizes", [Heads(), Heads(1, 3, 16, 64, False), Heads(2, 2, 40, 72)], ids=str)
def test_rows_of_every_kind(target: Target, sizes: Heads, dtype: torch.dtype) -> None:
    """In one launch; slots that no row begins from are NaN, and none of those that no row names changes."""
    first, rows = [position for position, _ in SCANNED], [row for _, row in SCANNED]
    slots, count = make_slots(rows)
    pool, cu = make_pool(slots, rows, count, sizes.state, torch.float32), begins(rows)
    given = layer(int(cu[-1]), sizes, dtype)
    step = mamba2(given.x, given.b, given.c, given.steps(), given.skip(), given.optional_gate())
    wanted, wanted_pool = expected(step, slots, rows, cu, pool, given.x.shape[1:])
    for each in on_cpu_too(target):
        out, after = scanned(given, first, rows, pool, slots, each)
        assert out.dtype is dtype
        assert_states(out, wanted, TOLERANCE[dtype])
        assert_states(after, wanted_pool, TOLERANCE[dtype])


@pytest.mark.parametrize("is_restored", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_cut_on_the_grid_and_no_company_changes_a_bit(target: Target, dtype: torch.dtype, is_restored: bool) -> None:
    """A row of 200 tokens, cut at 64 and 128, beside others; its states in working slots or through snapshots."""
    sizes, rows = Heads(), [StateRow(200, leave=(64, 128, 200))]
    given, (slots, count) = layer(200, sizes, dtype), make_slots(rows)
    for each in on_cpu_too(target):
        empty = torch.full((count, *sizes.state), POISON)
        whole, ended = scanned(given, [0], rows, empty, slots, each)
        plain, _ = scanned(given, [0], [StateRow(200)], empty, make_slots([StateRow(200)], padding=0)[0], each)
        assert_same_bits(plain, whole)
        state = None
        for entry, (at, end) in enumerate(((0, 64), (64, 128), (128, 200))):
            begin = Begin.FRESH if not at else Begin.RESTORE if is_restored else Begin.WORKING
            mixed = [StateRow(3), StateRow(end - at, begin, leave=(end - at,)), StateRow(70)]
            own, size = make_slots(mixed, seed=at)
            pool = make_pool(own, mixed, size, sizes.state, torch.float32)
            if state is not None:
                pool[sources(own, mixed)[1]] = state
            others = layer(73, sizes, dtype, seed=at)
            beside = others.part(0, 3).beside(given.part(at, end), others.part(3, 73))
            out, after = scanned(beside, [0, at, 0], mixed, pool, own, each)
            assert_same_bits(out[3 : 3 + end - at], whole[at:end])
            state = after[own.leave_slot[0]]
            assert_same_bits(after[own.working[1]], state)
            assert_same_bits(state, ended[slots.leave_slot[entry]])


def test_cuts_off_the_grid_agree_to_within_rounding(target: Target) -> None:
    sizes, (none, count) = Heads(), make_slots([StateRow(150)])
    given = layer(150, sizes, torch.float32)
    for each in on_cpu_too(target):
        pool = torch.full((count, *sizes.state), POISON)
        whole, ended = scanned(given, [0], [StateRow(150)], pool, none, each)
        parts, pool = [], torch.full((count, *sizes.state), POISON)
        for first, end in ((0, 1), (1, 63), (63, 65), (65, 100), (100, 150)):
            rows = [StateRow(end - first, Begin.WORKING if first else Begin.FRESH)]
            slots = none._replace(
                fresh=torch.tensor([int(not first)], dtype=torch.int32), restore=torch.zeros(1, dtype=torch.int32)
            )
            out, pool = scanned(given.part(first, end), [first], rows, pool, slots, each)
            parts.append(out)
        working, scale = none.working[0], whole.abs().max().item()
        torch.testing.assert_close(torch.cat(parts), whole, rtol=0.0, atol=1e-5 * scale)
        torch.testing.assert_close(pool[working], ended[working], rtol=0.0, atol=1e-5 * scale)


@pytest.mark.skipif(INTERPRETING, reason="a CPU's own route")
def test_company_changes_no_bit_with_two_threads() -> None:
    sizes, rows = Heads(1, 8, 64, 64), [StateRow(200), StateRow(130)]
    given, (slots, count) = layer(330, sizes, torch.float32), make_slots(rows)
    pool = torch.full((count, *sizes.state), POISON)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        together, _ = scanned(given, [0, 0], rows, pool, slots, CPU)
        alone, _ = scanned(given.part(200, 330), [0], [StateRow(130)], pool, make_slots([StateRow(130)])[0], CPU)
    finally:
        torch.set_num_threads(before)
    assert_same_bits(alone, together[200:])


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
