"""grouped_linear and its plan: near the product in fp64, each row's bits its own, in tiles of any size."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from kernels.backend import Backend
from kernels.errors import KernelArgumentError
from kernels.grouped_linear import TILE_ROWS, ExpertPlan, grouped_linear, packed_experts, plan_experts
from kernels.grouped_linear.plan import max_tiles
from tests.kernels.compare import assert_same_bits
from tests.kernels.conftest import INTERPRETING
from tests.kernels.target import Target

STEP = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-5}


class Layer(NamedTuple):
    """One product of an expert layer: a row for each token."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    ids: torch.Tensor


def made(*size: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def layer(tokens: int, top_k: int, experts: int, sizes: tuple[int, int], dtype: torch.dtype) -> Layer:
    """Even experts are chosen more often, and the last one never is."""
    chance = torch.tensor([4.0 if e % 2 == 0 else 1.0 for e in range(experts - 1)])
    drawn = chance.expand(max(tokens, 1), -1).multinomial(top_k, generator=torch.Generator().manual_seed(0))
    outputs, depth = sizes
    return Layer(
        made(tokens, depth, seed=1, dtype=dtype),
        made(experts, outputs, depth, seed=2, dtype=dtype),
        made(experts, outputs, seed=3, dtype=dtype),
        drawn[:tokens].int(),
    )


def multiplied(given: Layer, target: Target, rows: int | None = None, *, bias: bool = True) -> torch.Tensor:
    x, weight, biases, ids = (tensor.to(target.device) for tensor in given)
    plan = plan_experts(ids, weight.shape[0], tile_rows=rows, backend=target.backend)
    return grouped_linear(x, weight, plan, biases if bias else None, backend=target.backend)


def exact(given: Layer, *, bias: bool = True) -> torch.Tensor:
    """Each pair's product in fp64, by a loop over pairs."""
    rows = []
    for x, ids in zip(given.x.double(), given.ids.tolist(), strict=True):
        rows += [given.weight[e].double() @ x + (given.bias[e].double() if bias else 0.0) for e in ids]
    return torch.stack(rows)


def assert_near(got: torch.Tensor, wanted: torch.Tensor) -> None:
    step = STEP[got.dtype]
    torch.testing.assert_close(got.cpu().double(), wanted, rtol=step, atol=step * wanted.std().item() / 2)


def part(given: Layer, first: int, count: int) -> Layer:
    return given._replace(x=given.x[first : first + count], ids=given.ids[first : first + count])


@pytest.mark.parametrize("dtype", STEP, ids=str)
@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "sizes"), [(1, 3, 8, (130, 72)), (37, 2, 5, (64, 200)), (50, 1, 3, (48, 64))]
)
def test_products(
    target: Target, tokens: int, top_k: int, experts: int, sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    given = layer(tokens, top_k, experts, sizes, dtype)
    for bias in (False, True):
        assert_near(multiplied(given, target, bias=bias), exact(given, bias=bias))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_row_has_its_own_bits(target: Target, dtype: torch.dtype) -> None:
    """In tiles of every size, alone and among others, in another order, and where all tokens choose as it does."""
    given = layer(70, 3, 6, (70, 136), dtype)
    together = multiplied(given, target, 16).view(70, 3, -1)
    for rows in TILE_ROWS[1:]:
        assert_same_bits(multiplied(given, target, rows).view(70, 3, -1), together)
    for first, count in ((0, 1), (40, 1), (7, 20), (69, 1)):
        alone = multiplied(part(given, first, count), target)
        assert_same_bits(alone, together[first : first + count].flatten(0, 1))
    backwards = given._replace(x=given.x.flip(0), ids=given.ids.flip(0))
    assert_same_bits(multiplied(backwards, target).view(70, 3, -1).flip(0), together)
    crowd = multiplied(given._replace(ids=given.ids[40].expand(70, 3).contiguous()), target)
    assert_same_bits(crowd.view(70, 3, -1)[40], together[40])


def test_a_row_for_each_pair(target: Target) -> None:
    """What the second product reads: here every pair has its token's row, so it gives what the first one does."""
    given = layer(21, 2, 4, (40, 64), torch.bfloat16)
    wide = torch.full((42, 80), float("nan"), dtype=torch.bfloat16)
    wide[:, 8:72] = given.x.repeat_interleave(2, dim=0)
    of_pairs = wide.to(target.device)[:, 8:72]
    weight, ids = given.weight.to(target.device), given.ids.to(target.device)
    plan = plan_experts(ids, 4, backend=target.backend)
    got = grouped_linear(of_pairs, weight, plan, backend=target.backend)
    assert_same_bits(got, grouped_linear(given.x.to(target.device), weight, plan, backend=target.backend))


def test_weights_that_are_slices(target: Target) -> None:
    """Of a matrix that holds two projections, and with what belongs to nobody behind each row."""
    given = layer(9, 2, 3, (24, 48), torch.bfloat16)
    wide = torch.full((3, 60, 64), float("nan"), dtype=torch.bfloat16)
    wide[:, 30:54, :48] = given.weight
    got = multiplied(given._replace(weight=wide[:, 30:54, :48]), target)
    assert_same_bits(got, multiplied(given, target))


def test_weights_beyond_32_bits(target: Target) -> None:
    given = layer(9, 2, 4, (24, 48), torch.bfloat16)
    weight, stride = given.weight.to(target.device), 2**30
    pool = torch.empty(3 * stride + weight[0].numel(), dtype=weight.dtype, device=target.device)
    far = pool.as_strided(weight.shape, (stride, 48, 1))
    far.copy_(weight)
    assert far.stride(0) * 2 >= 2**31  # the third expert begins there
    assert_same_bits(multiplied(given._replace(weight=far), target), multiplied(given, target))


def test_one_expert_with_all_tokens(target: Target) -> None:
    given = layer(150, 1, 4, (16, 32), torch.bfloat16)._replace(ids=torch.full((150, 1), 2, dtype=torch.int32))
    assert_near(multiplied(given, target), exact(given))


def test_no_tokens(target: Target) -> None:
    given = layer(0, 2, 3, (24, 48), torch.bfloat16)
    assert multiplied(given, target).shape == (0, 24)
    plan = plan_experts(given.ids.to(target.device), 3, backend=target.backend)
    assert plan.num_tiles.tolist() == [0] and plan.starts.tolist() == [0] * 4


def plan_by_hand(ids: list[int], experts: int, rows: int) -> tuple[list[int], list[int], list[list[int]]]:
    by_expert = [[pair for pair, expert in enumerate(ids) if expert == e] for e in range(experts)]
    starts = [sum(map(len, by_expert[:e])) for e in range(experts + 1)]
    tiles = [[e, starts[e] + first] for e in range(experts) for first in range(0, len(by_expert[e]), rows)]
    return [pair for pairs in by_expert for pair in pairs], starts, tiles


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "rows"),
    [(1, 4, 9, 16), (25, 8, 17, 32), (300, 8, 40, 16), (300, 2, 3, 64), (40, 1, 1, 16), (4100, 8, 3, 128)],
)
def test_plans(target: Target, tokens: int, top_k: int, experts: int, rows: int) -> None:
    """The numbers of pairs are of each way to make a plan: in one launch, in chunks of 256 and in chunks of 512."""
    ids = torch.randint(-1, experts + 1, (tokens, top_k), generator=torch.Generator().manual_seed(4)).int()
    plan = plan_experts(ids.to(target.device), experts, tile_rows=rows, backend=target.backend)
    order, starts, tiles = plan_by_hand(ids.flatten().tolist(), experts, rows)
    assert plan.starts.tolist() == starts
    assert plan.order.tolist()[: len(order)] == order
    assert plan.num_tiles.tolist() == [len(tiles)]
    assert plan.tiles.tolist()[: len(tiles)] == tiles


@pytest.mark.skipif(INTERPRETING, reason="arithmetic only")
def test_the_bound_on_tiles_holds_and_is_reached() -> None:
    """The worst choice gives one pair to each expert and the rest to one of them, up to what fills its last tile."""
    for rows in TILE_ROWS:
        for experts in (1, 3, 40):
            for pairs in range(300):
                worst = 0
                for extra in range(rows):
                    spread = min(pairs, experts)
                    first = pairs - (spread - 1) - extra if spread else 0
                    if spread > 1 and first >= 1:
                        worst = max(worst, spread - 2 + -(-first // rows) + -(-(1 + extra) // rows))
                    elif spread == 1:
                        worst = -(-pairs // rows)
                assert worst <= max_tiles(pairs, experts, rows) <= worst + experts


PACKED_SHAPES = [(70, 136), (768, 512), (97, 50)]


@pytest.mark.skipif(INTERPRETING, reason="a CPU's own route")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("sizes", PACKED_SHAPES)
def test_packed_experts(sizes: tuple[int, int], threads: int) -> None:
    given = layer(90, 3, 6, sizes, torch.float32)
    packed = packed_experts(given.weight)
    if not isinstance(packed, tuple):
        pytest.skip("torch has no oneDNN here")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = grouped_linear(given.x, packed, plan_experts(given.ids, 6), given.bias)
        assert_near(together, exact(given))
        for first, count in ((0, 1), (40, 1), (7, 20), (3, 60)):
            some = part(given, first, count)
            alone = grouped_linear(some.x, packed, plan_experts(some.ids, 6), given.bias)
            assert_same_bits(alone, together[3 * first : 3 * (first + count)])
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(INTERPRETING, reason="a CPU's own route")
def test_what_is_not_packed() -> None:
    weight = made(2, 8, 16, seed=0)
    assert packed_experts(weight, Backend.REFERENCE) is weight
    assert packed_experts(weight.bfloat16()).dtype is torch.bfloat16  # type: ignore[union-attr]


X, WEIGHT = made(6, 32, seed=0), made(4, 16, 32, seed=1)
IDS = torch.tensor([[0, 2]] * 6, dtype=torch.int32)
PLAN = plan_experts(IDS, 4, backend=Backend.REFERENCE)
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"x": X[:5]}, "x: must have a row for each of 6 tokens or of 12 pairs, got 5"),
    ({"x": X[:, :8]}, r"x: shape must be \[any, 32\], got \[6, 8\]"),
    ({"x": X.half()}, "x: dtype must be one of"),
    ({"weight": WEIGHT[:3]}, r"weight: shape must be \[4, any, any\], got \[3, 16, 32\]"),
    ({"weight": WEIGHT.transpose(1, 2)}, "weight: the last axis must have stride 1"),
    ({"weight": (WEIGHT[0],)}, "weight: must be of 4 experts, got 1"),
    ({"bias": X[:4]}, r"bias: shape must be \[4, 16\], got \[4, 32\]"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_wrong_arguments_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(KernelArgumentError, match=message):
        grouped_linear(**{"x": X, "weight": WEIGHT, "plan": PLAN, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"expert_ids": IDS.long()}, "expert_ids: dtype must be one of"),
        ({"expert_ids": IDS.T}, "expert_ids: must be contiguous"),
        ({"expert_ids": IDS[:, :0]}, "expert_ids: a token must have an expert"),
        ({"num_experts": 0}, "num_experts: must be 1 to 1024, got 0"),
        ({"tile_rows": 48}, r"tile_rows: must be one of \(16, 32, 64, 128\), got 48"),
    ],
)
def test_wrong_plans_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(KernelArgumentError, match=message):
        plan_experts(**{"expert_ids": IDS, "num_experts": 4, **change})


def test_the_plan_has_the_size_of_its_pairs_alone() -> None:
    plans = [plan_experts(torch.full((64, 2), e, dtype=torch.int32), 8) for e in (0, 7)]
    sizes = [[t.shape for t in plan if isinstance(t, torch.Tensor)] for plan in plans]
    assert sizes[0] == sizes[1] and isinstance(plans[0], ExpertPlan)
    rows = [plan_experts(IDS[:1].expand(n, 2).contiguous(), 4).tile_rows for n in (1, 19, 20, 45, 46, 99, 100, 5000)]
    assert rows == [16, 16, 32, 32, 64, 64, 128, 128]
