"""gated_delta_scan: near the rule in fp64, and the same bits wherever a row is cut on the grid, and in any batch."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from kernels.block_scan import plan_scan
from kernels.errors import KernelArgumentError
from kernels.gated_delta_scan import gated_delta_scan
from kernels.state_slots import StateSlots
from tests.kernels.compare import assert_same_bits
from tests.kernels.conftest import INTERPRETING, rarely_interpreted
from tests.kernels.recurrences import Step, assert_states, expected, gated_delta
from tests.kernels.scans import (
    Scan,
    check_company_with_two_threads,
    check_cuts_off_the_grid,
    check_cuts_on_the_grid,
    check_rows_of_every_kind,
    on_cpu_too,
)
from tests.kernels.state_inputs import (
    POISON,
    Begin,
    StateRow,
    begins,
    keys,
    make_pool,
    make_slots,
    placed,
)
from tests.kernels.target import Target

# Of the largest output or state; 16 bits round factors of products.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


class Layer(NamedTuple):
    """A layer's inputs for some tokens."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor

    def part(self, first: int, end: int) -> Layer:
        return Layer(*(tensor[first:end] for tensor in self))

    def beside(self, *others: Layer) -> Layer:
        return Layer(*(torch.cat(tensors) for tensors in zip(self, *others, strict=True)))


class Heads(NamedTuple):
    """Heads of queries and keys, of values, and their sizes; `by_channel`: a decay for each key channel."""

    k_heads: int = 2
    heads: int = 4
    k_dim: int = 32
    dim: int = 24
    by_channel: bool = False

    @property
    def state(self) -> tuple[int, int, int]:
        return self.heads, self.k_dim, self.dim


def layer(tokens: int, sizes: Heads, dtype: torch.dtype, seed: int = 2) -> Layer:
    """Some tokens forget all, some nothing; some write with full strength, some not at all."""
    generator = torch.Generator().manual_seed(seed)

    def made(*size: int) -> torch.Tensor:
        return torch.randn((tokens, *size), generator=generator)

    g = -made(sizes.heads, *([sizes.k_dim] if sizes.by_channel else [])).abs() / 2
    beta = made(sizes.heads).sigmoid()
    g[3::17], g[5::11], beta[2::7], beta[6::13] = -60.0, 0.0, 1.0, 0.0
    if sizes.by_channel:
        # More than one factor for each token could hold, in some channels.
        g[4::9, :, ::3], g[7::10, :, 1::5] = -1e4, float("-inf")
    q, k, v = made(sizes.k_heads, sizes.k_dim), made(sizes.k_heads, sizes.k_dim), made(sizes.heads, sizes.dim)
    return Layer(q.to(dtype), k.to(dtype), v.to(dtype), g, beta)


def scanned(
    given: Layer, first: list[int], rows: list[StateRow], pool: torch.Tensor, slots: StateSlots, target: Target,
    norm_eps: float | None = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns the outputs and the pool afterwards, on the CPU; `pool` stays as it is."""
    device, cu = target.device, begins(rows)
    states = pool.to(device).clone()
    lengths = (cu.to(device), keys(first, rows).to(device))
    plan = plan_scan(*lengths, placed(slots, device), given.v.shape[0], backend=target.backend)
    out = gated_delta_scan(
        *(tensor.to(device) for tensor in given), states, plan, norm_eps=norm_eps, backend=target.backend
    )
    return out.cpu(), states.cpu()


def truth(given: Layer, sizes: Heads) -> Step:
    return gated_delta(*given, scale=sizes.k_dim**-0.5, norm_eps=1e-6)


SCAN = Scan(layer, scanned, truth)
CHANNELS = Heads(1, 2, by_channel=True)
# What is launched often: the interpreter takes a second for four heads of a few blocks.
CUT = [Heads(1, 2) if INTERPRETING else Heads(), Heads(1, 1, by_channel=True)]
SIZES = [
    *(Heads(), Heads(1, 1, 16, 64), Heads(2, 2, 72, 40)),
    *(CHANNELS, Heads(1, 1, 40, 64, True)),
]


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        *((sizes, torch.float32) for sizes in SIZES), (Heads(), torch.bfloat16), (CHANNELS, torch.bfloat16),
        *(rarely_interpreted(sizes, torch.bfloat16) for sizes in SIZES if sizes not in (Heads(), CHANNELS)),
        *(rarely_interpreted(sizes, torch.float16) for sizes in SIZES),
    ],
    ids=str,
)  # fmt: skip
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
@pytest.mark.parametrize("sizes", CUT, ids=str)
def test_no_cut_on_the_grid_and_no_company_changes_a_bit(
    target: Target, sizes: Heads, dtype: torch.dtype, is_restored: bool
) -> None:
    check_cuts_on_the_grid(SCAN, target, sizes, dtype, is_restored)


@pytest.mark.parametrize("sizes", CUT, ids=str)
def test_cuts_off_the_grid_agree_to_within_rounding(target: Target, sizes: Heads) -> None:
    check_cuts_off_the_grid(SCAN, target, sizes, is_relative=False)


@pytest.mark.skipif(INTERPRETING, reason="a CPU's own route")
@pytest.mark.parametrize("sizes", [Heads(4, 8, 64, 64), Heads(4, 8, 64, 64, True)], ids=str)
def test_company_changes_no_bit_with_two_threads(sizes: Heads) -> None:
    check_company_with_two_threads(SCAN, sizes)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.float16, 3e-3)], ids=str)
@pytest.mark.parametrize("fast", [-3.0, -90.0, rarely_interpreted(-1e30), float("-inf")])
def test_what_a_channel_keeps_behind_tokens_that_it_forgets(
    target: Target, fast: float, dtype: torch.dtype, tolerance: float
) -> None:
    """Every third token is forgotten by every second channel, among others that are kept nearly whole: no factor
    overflows, and no sum of fast decays takes the digits of slow ones."""
    rows = [StateRow(200, leave=(64, 128, 200))]
    given, (slots, count) = layer(200, CHANNELS, dtype), make_slots(rows)
    g = torch.full_like(given.g, -1e-3)
    g[::3, :, ::2] = fast
    given, pool = given._replace(g=g), torch.full((count, *CHANNELS.state), POISON)
    wanted, wanted_pool = expected(truth(given, CHANNELS), slots, rows, begins(rows), pool, given.v.shape[1:])
    for each in on_cpu_too(target):
        out, after = scanned(given, [0], rows, pool, slots, each)
        assert_states(out, wanted, tolerance)
        assert_states(after, wanted_pool, tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_keys_of_any_length_by_channel(target: Target, dtype: torch.dtype) -> None:
    rows = [StateRow(70, leave=(64, 70))]
    given, (slots, count) = layer(70, CHANNELS, dtype), make_slots(rows)
    given, pool = given._replace(k=given.k / 6.0), torch.full((count, *CHANNELS.state), POISON)
    step = gated_delta(*given, scale=CHANNELS.k_dim**-0.5, norm_eps=None)
    wanted, wanted_pool = expected(step, slots, rows, begins(rows), pool, given.v.shape[1:])
    for each in on_cpu_too(target):
        out, after = scanned(given, [0], rows, pool, slots, each, None)
        assert_states(out, wanted, TOLERANCE[dtype])
        assert_states(after, wanted_pool, TOLERANCE[dtype])


def test_decays_that_all_channels_share_are_those_of_a_head(target: Target) -> None:
    rows = [StateRow(150)]
    given, (slots, count) = layer(150, Heads(), torch.float32), make_slots(rows)
    each_channel = given._replace(g=given.g[:, :, None].expand(-1, -1, 32).contiguous())
    pool = torch.full((count, *Heads().state), POISON)
    for each in on_cpu_too(target):
        (out, after), (wanted, wanted_pool) = (
            scanned(one, [0], rows, pool, slots, each) for one in (each_channel, given)
        )
        assert_states(out, wanted.double(), 1e-5)
        assert_states(after, wanted_pool.double(), 1e-5)


@pytest.mark.parametrize("by_channel", [False, True])
def test_equal_keys_that_overwrite_each_other(target: Target, by_channel: bool) -> None:
    """No decay, full strength, one key for all: each value replaces the one before. Powers of A would be 10^18."""
    sizes, rows = Heads(1, 1, 16, 16, by_channel), [StateRow(128)]
    given, (slots, count) = layer(128, sizes, torch.float32), make_slots(rows)
    key = given.k[:1].expand(128, 1, 16).contiguous()
    given = given._replace(q=key, k=key, g=torch.zeros_like(given.g), beta=torch.ones(128, 1))
    for each in on_cpu_too(target):
        pool = torch.full((count, *sizes.state), POISON)
        out, _ = scanned(given, [0], rows, pool, slots, each)
        torch.testing.assert_close(out, given.v / 4.0, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("norm_eps", "sizes", "dtype"),
    [
        (None, Heads(), torch.float32), (1e-6, Heads(), torch.float32), (1e-6, CHANNELS, torch.float32),
        *((1e-6, sizes, torch.bfloat16) for sizes in (Heads(), CHANNELS)),
    ],
    ids=str,
)  # fmt: skip
def test_rows_that_are_slices_and_slots_that_lie_apart(
    target: Target, norm_eps: float | None, sizes: Heads, dtype: torch.dtype
) -> None:
    """Of a wider projection, behind the last row of which others follow; as it is served."""
    rows = [StateRow(70), StateRow(40, Begin.WORKING)]
    slots, count = make_slots(rows)
    given, pool = layer(110, sizes, dtype), make_pool(slots, rows, count, sizes.state, torch.float32)
    given = given._replace(k=given.k / 6.0)
    wide = {each: torch.full((130, 440), POISON, dtype=each) for each in {dtype, torch.float32}}
    ends = [8 + 64, 8 + 128, 8 + 128 + 96, 392 if sizes.by_channel else 240, 420]
    views = []
    for tensor, end in zip(given, ends, strict=True):
        width = tensor[0].numel()
        wide[tensor.dtype][:110, end - width : end] = tensor.flatten(1)
        views.append((tensor.dtype, end - width, end, tensor.shape[1:]))
    for each in on_cpu_too(target):
        device, cu = each.device, begins(rows)
        apart = torch.full((count, 2, *sizes.state), POISON, device=device)
        apart[:, 1] = pool.to(device)
        on_device = {dtype: projection.to(device) for dtype, projection in wide.items()}
        plan = plan_scan(cu.to(device), keys([0, 9], rows).to(device), placed(slots, device), 130, backend=each.backend)
        out = gated_delta_scan(
            *(on_device[kind][:, first:end].unflatten(1, shape) for kind, first, end, shape in views),
            apart[:, 1], plan, norm_eps=norm_eps, backend=each.backend,
        )  # fmt: skip
        wanted, wanted_pool = scanned(given, [0, 9], rows, pool, slots, each, norm_eps)
        assert_same_bits(out.cpu()[:110], wanted)
        assert not out[110:].any()
        assert_same_bits(apart[:, 1].cpu(), wanted_pool)
        assert apart[:, 0].isnan().all()


def test_rows_are_copied_that_begin_at_no_multiples_of_16_bytes() -> None:
    """What threads hold of a row decides on the order of its sum."""
    pytest.importorskip("triton")
    from kernels.block_scan.triton import aligned_rows

    wide, odd = (torch.randn(5, stride, generator=torch.Generator().manual_seed(1)) for stride in (448, 440))
    own = wide[:, 16:80].unflatten(1, (2, 32))
    assert aligned_rows(own, own)[1] is own
    for rows in (wide[:, 3:67], odd[:, 8:72]):
        slices = rows.unflatten(1, (2, 32)), wide[:, :40].unflatten(1, (1, 40))
        for given, aligned in zip(slices, aligned_rows(*slices), strict=True):
            assert aligned.data_ptr() % 16 == 0 and aligned.stride(0) % 16 == 0
            assert aligned.stride()[1:] == (given.shape[2], 1)
            assert_same_bits(aligned, given)


def test_slots_beyond_32_bits(target: Target) -> None:
    sizes, rows = Heads(1, 1, 16, 16), [StateRow(2, Begin.WORKING), StateRow(70, leave=(64,))]
    slots, count = make_slots(rows, padding=0)
    pool, cu = make_pool(slots, rows, count, sizes.state, torch.float32), begins(rows)
    given, stride = layer(72, sizes, torch.float32), 2**31 // (count - 1) + 1
    device = target.device
    store = torch.empty((count - 1) * stride + 256, device=device)
    far = store.as_strided(pool.shape, (stride, 256, 16, 1))
    far.copy_(pool)
    lengths = (cu.to(device), keys([9, 0], rows).to(device))
    plan = plan_scan(*lengths, placed(slots, device), 72, backend=target.backend)
    out = gated_delta_scan(*(tensor.to(device) for tensor in given), far, plan, norm_eps=1e-6, backend=target.backend)
    wanted, wanted_pool = scanned(given, [9, 0], rows, pool, slots, target)
    assert_same_bits(out.cpu(), wanted)
    assert_same_bits(far.cpu(), wanted_pool)


ROWS = [StateRow(4), StateRow(2)]
SLOTS, COUNT = make_slots(ROWS)
GIVEN, POOL = layer(6, Heads(), torch.float32), torch.zeros(COUNT, *Heads().state)
PLAN = plan_scan(begins(ROWS), begins(ROWS), SLOTS, 6)
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"v": GIVEN.v[:, 0]}, r"v: shape must be \[any, any, any\]"),
    ({"k": GIVEN.k.half()}, "k: dtype must be one of"),
    ({"k": GIVEN.v[:, :3]}, "k: its heads must divide 4 heads, got 3"),
    ({"k": torch.zeros(6, 2, 260)}, r"k: heads must have 1 to 256 elements, states are of \[260, 24\]"),
    ({"q": GIVEN.q[:, :1]}, r"q: shape must be \[6, 2, 32\], got \[6, 1, 32\]"),
    ({"q": GIVEN.q.transpose(0, 1).contiguous().transpose(0, 1)}, "q: a token's heads must be contiguous"),
    ({"g": GIVEN.g[:5]}, r"g: shape must be \[6, 4\], got \[5, 4\]"),
    ({"g": GIVEN.v}, r"g: shape must be \[6, 4, 32\], got \[6, 4, 24\]"),
    ({"g": GIVEN.g.expand(32, 6, 4).permute(1, 2, 0)}, "g: the last axis must have stride 1"),
    ({"beta": GIVEN.beta.long()}, "beta: dtype must be one of"),
    ({"states": POOL.bfloat16()}, "states: dtype must be one of"),
    ({"states": POOL.transpose(2, 3)}, r"states: shape must be \[any, 4, 32, 24\]"),
    ({"plan": plan_scan(begins(ROWS), begins(ROWS), SLOTS, 0)}, "plan: has 0 blocks"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_wrong_arguments_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(KernelArgumentError, match=message):
        gated_delta_scan(**{**GIVEN._asdict(), "states": POOL, "plan": PLAN, **change})
