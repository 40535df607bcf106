"""causal_conv: torch's own convolution over each whole sequence, and the same bits and columns wherever it is cut."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch.nn import functional

from kernels.causal_conv import causal_conv
from kernels.errors import KernelArgumentError
from kernels.state_slots import StateSlots
from tests.kernels.compare import assert_same_bits
from tests.kernels.conftest import INTERPRETING, rarely_interpreted
from tests.kernels.state_inputs import (
    MIXED,
    POISON,
    Begin,
    StateRow,
    begins,
    make_pool,
    make_slots,
    placed,
    sources,
)
from tests.kernels.target import REFERENCE, Target

STEP = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 1e-5}


class Layer(NamedTuple):
    """Weights of a convolution."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    silu: bool

    def convolved(self, columns: torch.Tensor) -> torch.Tensor:
        """Returns the outputs of all columns but the first d_conv - 1, in fp64."""
        channels, taps = self.weight.shape
        bias = None if self.bias is None else self.bias.double()
        weight = self.weight.double().view(channels, 1, taps)
        out = functional.conv1d(columns.double().T[None], weight, bias, groups=channels)[0].T
        return functional.silu(out) if self.silu else out


def made(*size: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def layer(channels: int, d_conv: int, dtype: torch.dtype, *, bias: bool = True, silu: bool = True) -> Layer:
    return Layer(
        made(channels, d_conv, seed=3, dtype=dtype), made(channels, seed=4, dtype=dtype) if bias else None, silu
    )


def run(
    given: Layer, x: torch.Tensor, cu_seqlens_q: torch.Tensor, pool: torch.Tensor, slots: StateSlots, target: Target
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the outputs and the pool afterwards, on the CPU; `pool` stays as it is."""
    device = target.device
    states, bias = pool.to(device).clone(), None if given.bias is None else given.bias.to(device)
    out = causal_conv(
        x.to(device), given.weight.to(device), bias, cu_seqlens_q.to(device), states, placed(slots, device),
        silu=given.silu, backend=target.backend,
    )  # fmt: skip
    return out.cpu(), states.cpu()


@pytest.mark.parametrize("dtype", STEP, ids=str)
@pytest.mark.parametrize(
    ("channels", "d_conv", "bias", "silu"), [(40, 4, True, True), (300, 3, False, False), (1100, 2, True, False)]
)
def test_rows_of_every_kind(
    target: Target, channels: int, d_conv: int, bias: bool, silu: bool, dtype: torch.dtype
) -> None:
    """In one launch; slots that no row begins from are NaN, and none of those that no row names changes."""
    given, carried = layer(channels, d_conv, dtype, bias=bias, silu=silu), d_conv - 1
    slots, count = make_slots(MIXED)
    pool, cu = make_pool(slots, MIXED, count, (carried, channels), dtype), begins(MIXED)
    x = made(int(cu[-1]), channels, seed=2, dtype=dtype)
    out, after = run(given, x, cu, pool, slots, target)
    wanted = pool.clone()
    for index, (row, source) in enumerate(zip(MIXED, sources(slots, MIXED), strict=True)):
        tokens = x[cu[index] : cu[index + 1]]
        columns = torch.cat((pool[source] if source else torch.zeros_like(pool[0]), tokens))
        got = out[cu[index] : cu[index + 1]]
        if row.begin is Begin.PADDING:
            assert not got.any()
            continue
        exact = given.convolved(columns) if row.tokens else got.double()
        torch.testing.assert_close(got.double(), exact, rtol=STEP[dtype], atol=STEP[dtype])
        wanted[slots.working[index]] = columns[row.tokens :]
        if row.rolling:
            wanted[slots.rolling[index]] = columns[row.tokens :]
        for entry in range(slots.num_leaves):
            if slots.leave_slot[entry] > 0 and slots.leave_row[entry] == index:
                first = int(slots.leave_tokens[entry])
                wanted[slots.leave_slot[entry]] = columns[first : first + carried]
    assert_same_bits(after, wanted)


CUTS = [(1, 2), (3, 4, 5, 6, 7, 8, 9), (17,), (2, 40), (39,)]


@pytest.mark.parametrize(
    ("d_conv", "cuts"),
    [
        *((4, cuts) for cuts in CUTS[:4]),
        (8, (1, 2)),
        rarely_interpreted(4, CUTS[4]),
        *(rarely_interpreted(8, cuts) for cuts in CUTS[1:]),
    ],
)
def test_no_cut_and_no_company_changes_a_bit(target: Target, d_conv: int, cuts: tuple[int, ...]) -> None:
    """A sequence of 45 tokens in launches beside others, its columns in the working slot or through a snapshot."""
    given, channels = layer(70, d_conv, torch.bfloat16), 70
    x = made(45, channels, seed=5, dtype=torch.bfloat16)
    none, count = make_slots([StateRow(45)])
    empty = torch.full((count, d_conv - 1, channels), POISON, dtype=x.dtype)
    whole, ended = run(given, x, begins([StateRow(45)]), empty, none, target)
    for is_restored in (False, True):
        parts, columns = [], None
        for first, end in zip((0, *cuts), (*cuts, 45), strict=True):
            begin = Begin.FRESH if not first else Begin.RESTORE if is_restored else Begin.WORKING
            rows = [StateRow(1), StateRow(end - first, begin, leave=(end - first,)), StateRow(20)]
            slots, count = make_slots(rows, seed=first)
            pool = make_pool(slots, rows, count, (d_conv - 1, channels), x.dtype)
            if columns is not None:
                pool[sources(slots, rows)[1]] = columns
            others = made(21, channels, seed=first, dtype=x.dtype)
            packed = torch.cat((others[:1], x[first:end], others[1:]))
            out, after = run(given, packed, begins(rows), pool, slots, target)
            parts.append(out[1 : 1 + end - first])
            columns = after[slots.leave_slot[0]]
            assert_same_bits(after[slots.working[1]], columns)
        assert_same_bits(torch.cat(parts), whole)
        assert columns is not None
        assert_same_bits(columns, ended[none.working[0]])


def test_tokens_behind_the_last_row_are_zeros(target: Target) -> None:
    """As in the bucket of a captured graph, whose launch has fewer tokens than its buffers."""
    given, rows = layer(40, 4, torch.float32), [StateRow(3), StateRow(30)]
    slots, count = make_slots(rows)
    pool = torch.full((count, 3, 40), POISON)
    x = made(50, 40, seed=6)
    x[33:] = POISON
    out, after = run(given, x, begins(rows), pool, slots, target)
    short, after_short = run(given, x[:33], begins(rows), pool, slots, target)
    assert_same_bits(out, torch.cat((short, torch.zeros(17, 40))))
    assert_same_bits(after, after_short)
    none = StateSlots(*(array[:0] for array in slots))
    nobody, untouched = run(given, x, begins([]), pool, none, target)
    assert not nobody.any() and untouched.isnan().all()


def test_launches_of_many_tokens_have_the_same_bits(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take a shorter way for tiles within a row, and every other one as rows that begin or end in it."""
    pytest.importorskip("triton")
    given, rows = layer(70, 4, torch.bfloat16), [StateRow(50), *MIXED, StateRow(40)]
    slots, count = make_slots(rows)
    pool, cu = make_pool(slots, rows, count, (3, 70), torch.bfloat16), begins(rows)
    x = made(int(cu[-1]) + 20, 70, seed=2, dtype=torch.bfloat16)
    wanted = run(given, x, cu, pool, slots, target)
    monkeypatch.setattr("kernels.causal_conv.triton.WHOLE_TOKENS", 1)
    for got, one in zip(run(given, x, cu, pool, slots, target), wanted, strict=True):
        assert_same_bits(got, one)


def test_rows_that_are_slices_and_slots_that_lie_apart(target: Target) -> None:
    given, rows = layer(48, 4, torch.bfloat16), MIXED
    slots, count = make_slots(rows)
    pool, cu = make_pool(slots, rows, count, (3, 48), torch.bfloat16), begins(rows)
    x = made(int(cu[-1]), 48, seed=2, dtype=torch.bfloat16)
    wanted, wanted_pool = run(given, x, cu, pool, slots, target)
    device = target.device
    wide = torch.full((x.shape[0], 80), POISON, dtype=x.dtype, device=device)
    wide[:, 16:64] = x.to(device)
    apart = torch.full((count, 2, 3, 48), POISON, dtype=x.dtype, device=device)
    apart[:, 1] = pool.to(device)
    bias = given.bias
    assert bias is not None
    out = causal_conv(
        wide[:, 16:64], given.weight.to(device), bias.to(device), cu.to(device), apart[:, 1], placed(slots, device),
        silu=True, backend=target.backend,
    )  # fmt: skip
    assert_same_bits(out.cpu(), wanted)
    assert_same_bits(apart[:, 1].cpu(), wanted_pool)
    assert apart[:, 0].isnan().all()


def test_slots_beyond_32_bits(target: Target) -> None:
    given, rows = layer(40, 4, torch.bfloat16), [StateRow(2, Begin.WORKING), StateRow(9, leave=(4,))]
    slots, count = make_slots(rows, padding=0)
    pool, cu = make_pool(slots, rows, count, (3, 40), torch.bfloat16), begins(rows)
    x, stride = made(11, 40, seed=2, dtype=torch.bfloat16), 2**31 // (count - 1) + 1
    store = torch.empty((count - 1) * stride + 120, dtype=x.dtype, device=target.device)
    far = store.as_strided(pool.shape, (stride, 40, 1))
    far.copy_(pool)
    bias = given.bias
    assert bias is not None
    device = target.device
    out = causal_conv(
        x.to(device), given.weight.to(device), bias.to(device), cu.to(device), far, placed(slots, device),
        silu=True, backend=target.backend,
    )  # fmt: skip
    wanted, wanted_pool = run(given, x, cu, pool, slots, target)
    assert_same_bits(out.cpu(), wanted)
    assert_same_bits(far.cpu(), wanted_pool)


# No more tokens than rows: a path of its own for rows of one token, and a few that have none, or many.
DECODES = (
    StateRow(1, Begin.WORKING, rolling=True),
    StateRow(1, Begin.FRESH),
    StateRow(1, Begin.RESTORE, leave=(1,), rolling=True),
    StateRow(1, Begin.PADDING),
    StateRow(0, Begin.RESTORE),
    StateRow(3, Begin.WORKING),
    StateRow(21, Begin.RESTORE, leave=(16,)),
    *[StateRow(0, Begin.PADDING)] * 21,
)


@pytest.mark.parametrize(("d_conv", "dtype"), [(4, torch.bfloat16), (2, torch.float16), (2, torch.float32)], ids=str)
@pytest.mark.parametrize("rows", [DECODES[:4], DECODES], ids=["one token each", "any"])
def test_decodes_have_the_bits_of_prompts(
    target: Target, rows: tuple[StateRow, ...], d_conv: int, dtype: torch.dtype
) -> None:
    """Tokens behind the last row make it a launch of prompts. Weights are read as integers if they begin so."""
    given, (slots, count) = layer(40, d_conv, dtype), make_slots(rows, padding=0)
    pool, cu = make_pool(slots, rows, count, (d_conv - 1, 40), dtype), begins(rows)
    num_tokens = int(cu[-1])
    assert num_tokens <= len(rows)
    x = made(len(rows) + 1, 40, seed=2, dtype=dtype)
    wanted, wanted_pool = run(given, x, cu, pool, slots, target)
    weight = given.weight.to(target.device)
    off = torch.cat((weight[0, :1], weight.flatten()))[1:].view(40, d_conv)
    for each in (given, given._replace(weight=off)):
        out, after = run(each, x[: len(rows)], cu, pool, slots, target)
        assert_same_bits(out, wanted[: len(rows)])
        assert_same_bits(after, wanted_pool)


@pytest.mark.skipif(INTERPRETING, reason="the reference alone")
def test_more_threads_change_no_bit() -> None:
    """A row alone and among 1,501 others."""
    given, rows = layer(96, 4, torch.float32), [StateRow(700), StateRow(801)]
    slots, count = make_slots(rows)
    pool, x = torch.full((count, 3, 96), POISON), made(1501, 96, seed=2)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        together, _ = run(given, x, begins(rows), pool, slots, REFERENCE)
        torch.set_num_threads(1)
        alone, _ = run(given, x[700:737], begins([StateRow(37)]), pool, make_slots([StateRow(37)])[0], REFERENCE)
    finally:
        torch.set_num_threads(before)
    assert_same_bits(alone, together[700:737])


ROWS = [StateRow(4), StateRow(2)]
SLOTS, COUNT = make_slots(ROWS)
X, WEIGHT, POOL = made(6, 32, seed=0), made(32, 4, seed=1), torch.zeros(COUNT, 3, 32)
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"x": X[:, :8]}, r"x: shape must be \[any, 32\], got \[6, 8\]"),
    ({"x": X.half()}, "x: dtype must be one of"),
    ({"x": X.T.contiguous().T}, "x: the last axis must have stride 1"),
    ({"weight": WEIGHT[:, :1]}, "weight: must have 2 to 8 taps for each channel, got 1"),
    ({"weight": made(4, 32, seed=1).T}, "weight: must be contiguous"),
    ({"bias": X[:, 0]}, r"bias: shape must be \[32\], got \[6\]"),
    ({"states": POOL[:, :2]}, r"states: shape must be \[any, 3, 32\], got"),
    ({"states": POOL.bfloat16()}, "states: dtype must be one of"),
    ({"states": POOL.transpose(1, 2).contiguous().transpose(1, 2)}, "states: a page must be dense"),
    ({"cu_seqlens_q": begins(ROWS).long()}, "cu_seqlens_q: dtype must be one of"),
    ({"cu_seqlens_q": begins(ROWS)[:2]}, r"slots.working: shape must be \[1\], got \[2\]"),
    ({"slots": SLOTS._replace(rolling=SLOTS.rolling.long())}, "slots.rolling: dtype must be one of"),
    ({"slots": SLOTS._replace(leave_slot=SLOTS.leave_slot[:1])}, r"slots.leave_slot: shape must be \[2\], got \[1\]"),
    ({"x": POOL.flatten(0, 1)[:6]}, "states: shares memory with x"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_wrong_arguments_are_named(change: dict[str, Any], message: str) -> None:
    given = {"x": X, "weight": WEIGHT, "bias": None, "cu_seqlens_q": begins(ROWS), "states": POOL, "slots": SLOTS}
    before = POOL.clone()
    with pytest.raises(KernelArgumentError, match=message):
        causal_conv(**{**given, **change})
    assert_same_bits(POOL, before)
