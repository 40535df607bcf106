"""update_gated_delta and update_mamba2: near the recurrences in fp64, the same bits however tokens are cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from kernels.errors import KernelArgumentError
from kernels.state_slots import StateSlots
from kernels.state_update import update_gated_delta, update_mamba2
from tests.kernels import test_gated_delta_scan as delta
from tests.kernels import test_mamba2_scan as ssd
from tests.kernels.compare import assert_same_bits
from tests.kernels.recurrences import assert_states, expected, gated_delta, mamba2
from tests.kernels.state_inputs import POISON, Begin, StateRow, begins, make_pool, make_slots, placed, sources
from tests.kernels.target import REFERENCE, Target

# Of the largest output or state; 16 bits round inputs and outputs alone.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 1e-3}
# 1 to 8 tokens, none, rows of every kind; nothing is left within a row.
ROWS = (
    StateRow(1, Begin.WORKING, rolling=True),
    StateRow(1),
    StateRow(0, Begin.RESTORE, rolling=True),
    StateRow(8, Begin.RESTORE, rolling=True),
    StateRow(2, Begin.PADDING),
    StateRow(3, Begin.WORKING),
    StateRow(0),
    StateRow(5),
    StateRow(0, Begin.WORKING),
    StateRow(1, Begin.PADDING),
)
Updated = tuple[torch.Tensor, torch.Tensor]


def update_delta(
    given: delta.Layer, rows: Sequence[StateRow], pool: torch.Tensor, slots: StateSlots, target: Target
) -> Updated:
    """Returns the outputs and the pool afterwards, on the CPU; `pool` stays as it is."""
    device = target.device
    states = pool.to(device).clone()
    out = update_gated_delta(
        *(tensor.to(device) for tensor in given), states, begins(rows).to(device), placed(slots, device),
        norm_eps=1e-6, backend=target.backend,
    )  # fmt: skip
    return out.cpu(), states.cpu()


def update_ssd(
    given: ssd.Layer, rows: Sequence[StateRow], pool: torch.Tensor, slots: StateSlots, target: Target
) -> Updated:
    """The same of Mamba2."""
    device = target.device
    states = pool.to(device).clone()
    out = update_mamba2(
        given.x.to(device), given.b.to(device), given.c.to(device), given.steps(device), states,
        begins(rows).to(device), placed(slots, device), skip=given.skip(device), gate=given.optional_gate(device),
        backend=target.backend,
    )  # fmt: skip
    return out.cpu(), states.cpu()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("sizes", [delta.Heads(), delta.Heads(2, 2, 72, 40), delta.CHANNELS], ids=str)
def test_delta_rows_of_every_kind(target: Target, sizes: delta.Heads, dtype: torch.dtype) -> None:
    """In one launch, with tokens behind the last row."""
    slots, count = make_slots(ROWS, padding=0)
    pool, cu = make_pool(slots, ROWS, count, sizes.state, torch.float32), begins(ROWS)
    given = delta.layer(int(cu[-1]) + 3, sizes, dtype)
    step = gated_delta(*given, scale=sizes.k_dim**-0.5, norm_eps=1e-6)
    wanted, wanted_pool = expected(step, slots, ROWS, cu, pool, given.v.shape[1:])
    out, after = update_delta(given, ROWS, pool, slots, target)
    assert out.dtype is dtype and not out[cu[-1] :].any()
    assert_states(out[: cu[-1]], wanted, TOLERANCE[dtype])
    assert_states(after, wanted_pool, TOLERANCE[dtype] if dtype is torch.float32 else 1e-5)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("sizes", [ssd.Heads(), ssd.Heads(1, 3, 16, 72, False)], ids=str)
def test_mamba2_rows_of_every_kind(target: Target, sizes: ssd.Heads, dtype: torch.dtype) -> None:
    slots, count = make_slots(ROWS, padding=0)
    pool, cu = make_pool(slots, ROWS, count, sizes.state, torch.float32), begins(ROWS)
    given = ssd.layer(int(cu[-1]) + 3, sizes, dtype)
    step = mamba2(given.x, given.b, given.c, given.steps(), given.skip(), given.optional_gate())
    wanted, wanted_pool = expected(step, slots, ROWS, cu, pool, given.x.shape[1:])
    out, after = update_ssd(given, ROWS, pool, slots, target)
    assert out.dtype is dtype and not out[cu[-1] :].any()
    assert_states(out[: cu[-1]], wanted, TOLERANCE[dtype])
    assert_states(after, wanted_pool, 1e-5)


def cut(
    update: Callable[[int, int, Sequence[StateRow], torch.Tensor, StateSlots], Updated], shape: Sequence[int]
) -> None:
    """Eight tokens at once, alone; then in launches of 1, 2, 1 and 4 among others: the same bits each time."""
    one = [StateRow(8)]
    slots, count = make_slots(one, padding=0)
    whole, ended = update(0, 8, one, torch.full((count, *shape), POISON), slots)
    state = None
    parts = []
    for first, end in ((0, 1), (1, 3), (3, 4), (4, 8)):
        rows = [StateRow(end - first, Begin.WORKING if first else Begin.FRESH, rolling=True), StateRow(2)]
        own, size = make_slots(rows, seed=first, padding=0)
        pool = make_pool(own, rows, size, shape, torch.float32)
        if state is not None:
            pool[sources(own, rows)[0]] = state
        out, after = update(first, end, rows, pool, own)
        parts.append(out[: end - first])
        state = after[own.working[0]]
        assert_same_bits(after[own.rolling[0]], state)
    assert state is not None
    assert_same_bits(torch.cat(parts), whole)
    assert_same_bits(state, ended[slots.working[0]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [delta.Heads(), delta.CHANNELS], ids=str)
def test_no_cut_and_no_company_changes_a_bit_of_the_delta_rule(
    target: Target, sizes: delta.Heads, dtype: torch.dtype
) -> None:
    deltas, others = delta.layer(8, sizes, dtype), delta.layer(2, sizes, dtype, seed=9)

    def of_delta(first: int, end: int, rows: Sequence[StateRow], pool: torch.Tensor, slots: StateSlots) -> Updated:
        given = deltas.part(first, end)
        return update_delta(given if len(rows) == 1 else given.beside(others), rows, pool, slots, target)

    cut(of_delta, sizes.state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_cut_and_no_company_changes_a_bit_of_mamba2(target: Target, dtype: torch.dtype) -> None:
    ssds, ssd_others = ssd.layer(8, ssd.Heads(), dtype), ssd.layer(2, ssd.Heads(), dtype, seed=9)

    def of_ssd(first: int, end: int, rows: Sequence[StateRow], pool: torch.Tensor, slots: StateSlots) -> Updated:
        given = ssds.part(first, end)
        return update_ssd(given if len(rows) == 1 else given.beside(ssd_others), rows, pool, slots, target)

    cut(of_ssd, ssd.Heads().state)


@pytest.mark.parametrize("sizes", [delta.Heads(), delta.CHANNELS], ids=str)
def test_updates_continue_what_scans_leave(target: Target, sizes: delta.Heads) -> None:
    """70 tokens of a prompt, then 5 that are decoded: near the scan of all 75."""
    rows, (slots, count) = [StateRow(75)], make_slots([StateRow(75)], padding=0)
    goes_on = slots._replace(fresh=torch.zeros_like(slots.fresh), restore=torch.zeros_like(slots.restore))
    lists, decoded = [StateRow(70)], [StateRow(5, Begin.WORKING)]
    deltas, ssds = delta.layer(75, sizes, torch.float32), ssd.layer(75, ssd.Heads(), torch.float32)
    pool = torch.full((count, *sizes.state), POISON)
    whole, ended = delta.scanned(deltas, [0], rows, pool, slots, target)
    _, prompt = delta.scanned(deltas.part(0, 70), [0], lists, pool, slots, target)
    out, after = update_delta(deltas.part(70, 75), decoded, prompt, goes_on, target)
    assert_states(out, whole[70:].double(), 1e-5)
    assert_states(after, ended.double(), 1e-5)
    pool = torch.full((count, *ssd.Heads().state), POISON)
    whole, ended = ssd.scanned(ssds, [0], rows, pool, slots, target)
    _, prompt = ssd.scanned(ssds.part(0, 70), [0], lists, pool, slots, target)
    out, after = update_ssd(ssds.part(70, 75), decoded, prompt, goes_on, target)
    assert_states(out, whole[70:].double(), 1e-5)
    assert_states(after, ended.double(), 1e-5)


def test_no_rows(target: Target) -> None:
    slots, _ = make_slots([], padding=0)
    pool = torch.full((2, *delta.Heads().state), POISON)
    out, after = update_delta(delta.layer(3, delta.Heads(), torch.float32), [], pool, slots, target)
    assert not out.any() and after.isnan().all()


def test_wrong_arguments_are_named() -> None:
    """Tensors are checked as for scans (test_gated_delta_scan, test_mamba2_scan); here are lengths and slots."""
    rows = [StateRow(2)]
    given, pool = delta.layer(2, delta.Heads(), torch.float32), torch.zeros(9, *delta.Heads().state)
    left, _ = make_slots([StateRow(2, leave=(1,))], padding=0)
    with pytest.raises(KernelArgumentError, match=r"slots\.leave_row: an update leaves no state within a row, got 1"):
        update_delta(given, rows, pool, left, REFERENCE)
    slots, _ = make_slots(rows, padding=0)
    with pytest.raises(KernelArgumentError, match=r"slots.working: shape must be \[2\], got \[1\]"):
        update_delta(given, [StateRow(1), StateRow(1)], pool, slots, REFERENCE)
    with pytest.raises(KernelArgumentError, match="cu_seqlens_q: dtype must be one of"):
        update_gated_delta(*given, pool, begins(rows).long(), slots)
    with pytest.raises(KernelArgumentError, match="states: dtype must be one of"):
        update_delta(given, rows, pool.bfloat16(), slots, REFERENCE)


def test_scans_continue_what_updates_leave(target: Target) -> None:
    """The other way round: a scan resumes off the grid where an update has stopped."""
    given, (slots, count) = ssd.layer(70, ssd.Heads(), torch.float32), make_slots([StateRow(70)], padding=0)
    pool = torch.full((count, *ssd.Heads().state), POISON)
    whole, ended = ssd.scanned(given, [0], [StateRow(70)], pool, slots, target)
    _, decoded = update_ssd(given.part(0, 3), [StateRow(3)], pool, slots, target)
    goes_on = slots._replace(fresh=torch.zeros_like(slots.fresh), restore=torch.zeros_like(slots.restore))
    out, after = ssd.scanned(given.part(3, 70), [3], [StateRow(67, Begin.WORKING)], decoded, goes_on, target)
    assert_states(out, whole[3:].double(), 1e-5)
    assert_states(after, ended.double(), 1e-5)
