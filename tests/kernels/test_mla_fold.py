"""The folds of a latent decode: of what was cut by load, in both of its forms, and of leaves and groups of leaves."""

import pytest
import torch
import triton.language as tl

from kernels.backend import Backend
from kernels.mla_decode import MlaDecodePlan
from tests.kernels.conftest import rarely_interpreted
from tests.kernels.target import Target

# Rows and parts of each cut unit.
UNITS = {
    "one of many parts": [(64, 70)],
    "one of 64": [(64, 64)],
    "a few": [(64, 2), (64, 17), (13, 40)],
    "many": [(64, 2)] * 9 + [(1, 33), (64, 3)],
}


def plan_of(units: list[tuple[int, int]], heads: int, device: str) -> MlaDecodePlan:
    """A plan with random parts of these units; what lies behind their slots is not to be read."""
    plan = MlaDecodePlan(len(units), 8192, heads, by_load=True, programs=110, device=device)
    slots = 0
    for unit, (rows, parts) in enumerate(units):
        plan.shared[unit] = torch.tensor([unit * 64, min(rows, plan.slot_rows), parts, slots * plan.slot_rows])
        slots += parts
    plan.counts[2] = len(units)
    plan.parts.normal_()
    plan.levels.normal_().mul_(20)
    plan.levels[::3] = float("-inf")  # parts that have seen no key
    plan.parts[::3] = 0.0
    plan.parts[slots:] = float("nan")
    return plan


def columns(few: bool) -> torch.Tensor:
    """Which column lies at each place of a part's row."""
    place = torch.arange(256)
    halves = place
    if not few:
        halves = place // 32 * 32 + place // 2 % 4 * 8 + place // 8 % 4 * 2 + place % 2
    return torch.cat([halves, halves + 256])


@pytest.mark.parametrize("heads", [12, rarely_interpreted(20), 48, 128])
@pytest.mark.parametrize("name", UNITS)
def test_parts_of_a_unit_are_weighed_by_their_sums(
    target: Target, monkeypatch: pytest.MonkeyPatch, name: str, heads: int
) -> None:
    if target.backend is Backend.REFERENCE:
        pytest.skip("the reference cuts nothing")
    from kernels.mla_decode.hopper.fold_cuts import fold

    if target.device == "cpu":
        monkeypatch.setattr(tl.extra.cuda, "gdc_wait", lambda: None)
    torch.manual_seed(0)
    plan = plan_of(UNITS[name], heads, target.device)
    tokens = -(-64 * len(UNITS[name]) // heads)
    out = torch.full((tokens, heads, 512), 7.0, dtype=torch.float32, device=target.device)
    lse = torch.full((heads, tokens), 7.0, device=target.device)
    fold(plan, len(UNITS[name]), out, lse)
    wanted, wanted_lse = (
        torch.full_like(out, 7.0).view(-1, 512).double(),
        torch.full_like(lse.T, 7.0).flatten().double(),
    )
    for first_row, rows, parts, part_row in plan.shared[: len(UNITS[name])].tolist():
        slot = part_row // plan.slot_rows
        values = torch.empty((parts, plan.slot_rows, 512), dtype=torch.float64, device=target.device)
        values[:, :, columns(plan.transposed)] = plan.parts[slot : slot + parts].double()
        weight = torch.exp2(plan.levels[slot : slot + parts].double())
        total = weight.sum(0)
        folded = (values * weight[..., None]).sum(0) / torch.where(total == 0, 1.0, total)[:, None]
        wanted[first_row : first_row + rows] = folded[:rows]
        wanted_lse[first_row : first_row + rows] = torch.log(total)[:rows]
    torch.testing.assert_close(out.view(-1, 512).double(), wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lse.T.flatten().double(), wanted_lse, rtol=1e-4, atol=1e-4)


State = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def added(a: State, b: State) -> State:
    """The softmax state of two, in fp32."""
    top = torch.maximum(a[1], b[1])
    keep, weight = torch.exp2(a[1] - top), torch.exp2(b[1] - top)
    return a[0] * keep[:, None] + b[0] * weight[:, None], top, a[2] * keep + b[2] * weight


def rounded(a: State) -> State:
    """What is added to a neighbour or stored."""
    return a[0].bfloat16().float(), a[1], a[2]


def tree(states: list[State]) -> State:
    """Neighbours in twos, what has none as it is, until there is one."""
    while len(states) > 1:
        pairs = [states[first : first + 2] for first in range(0, len(states), 2)]
        states = [added(*map(rounded, pair)) if len(pair) == 2 else pair[0] for pair in pairs]
    return states[0]


@pytest.mark.parametrize("step", [1, rarely_interpreted(2), 8])
@pytest.mark.parametrize("parts", [1, 2, 4, 5, 8, 9, rarely_interpreted(21), 40])
def test_parts_of_leaves_are_a_tree(target: Target, monkeypatch: pytest.MonkeyPatch, parts: int, step: int) -> None:
    """Another order of additions is off by more than the tolerance somewhere."""
    if target.backend is Backend.REFERENCE:
        pytest.skip("the reference cuts nothing")
    from kernels.mla_decode.hopper import fold as module

    if target.device == "cpu":
        monkeypatch.setattr(tl.extra.cuda, "gdc_wait", lambda: None)
    torch.manual_seed(parts)
    plan = MlaDecodePlan(2, max(parts * step, 8) * 1152, 48, programs=110, device=target.device)
    plan.counts[:3] = torch.tensor([parts, step, 1])
    plan.shared[0] = torch.tensor([1, 1, parts, 3])
    plan.acc.normal_()
    plan.row_max.copy_(torch.randint(-9, 9, plan.row_max.shape))
    plan.row_sum.uniform_(0.5, 2.0)
    plan.row_max[4], plan.row_sum[4], plan.acc[4] = -1.0e20, 0.0, 0.0  # a part that has seen no key
    out = torch.full((2, 48, 512), 7.0, device=target.device)
    module.fold(plan, 1, out, None)
    # 32 places of a row, then of the next.
    places = plan.acc.float().reshape(-1, 16, plan.slot_rows, 32).transpose(1, 2).reshape(-1, plan.slot_rows, 512)
    values = torch.empty_like(places)
    values[..., columns(False)] = places
    acc, _, row_sum = tree([(values[3 + i], plan.row_max[3 + i], plan.row_sum[3 + i]) for i in range(parts)])
    # The kernel multiplies by a reciprocal.
    torch.testing.assert_close(out[1], acc * (1.0 / row_sum)[:, None], rtol=1e-6, atol=0.0)
    assert bool((out[0] == 7.0).all())
