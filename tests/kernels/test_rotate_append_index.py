"""rotate_append_index: layer norm, rotation and slots of an indexer's keys, queries turned in place."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from kernels.errors import KernelArgumentError
from kernels.fp8 import E4M3, saturate, token_scales
from kernels.rotate_append_index import IndexQueries, rotate_append_index
from tests.kernels.compare import assert_same_bits
from tests.kernels.inputs import POISON
from tests.kernels.target import Target

EPS, NUM_POSITIONS, NUM_PAGES, PAGE_TOKENS, TOKENS, PADDING = 1e-6, 50, 5, 8, 11, 3


@dataclass(frozen=True, slots=True)
class Inputs:
    q: torch.Tensor
    weights: torch.Tensor
    k: torch.Tensor
    positions: torch.Tensor
    cos_sin: torch.Tensor
    slots: torch.Tensor
    norm: torch.Tensor
    bias: torch.Tensor

    def pages(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        size = (NUM_PAGES, PAGE_TOKENS, self.k.shape[1])
        return torch.full(size, POISON, dtype=self.k.dtype, device=self.q.device).to(dtype or self.k.dtype)

    def scales(self) -> torch.Tensor:
        return torch.full((NUM_PAGES, PAGE_TOKENS), POISON, device=self.q.device)

    def rows(self, rows: slice) -> Inputs:
        parts = (self.q, self.weights, self.k, self.positions, self.slots)
        q, weights, k, positions, slots = (part[rows].clone() for part in parts)
        return replace(self, q=q, weights=weights, k=k, positions=positions, slots=slots)


def make(target: Target, heads: int = 20, dim: int = 24, rope: int = 8, dtype: torch.dtype = torch.bfloat16) -> Inputs:
    """Rows of one product; one token is padding."""
    rng, device = torch.Generator().manual_seed(0), target.device
    wide = torch.randn(TOKENS, (heads + 1) * dim + 8, generator=rng).to(dtype).to(device)
    angles = torch.rand(NUM_POSITIONS, rope // 2, generator=rng) * 6.3
    slots = torch.randperm(NUM_PAGES * PAGE_TOKENS, generator=rng)[:TOKENS]
    slots[PADDING] = -1
    return Inputs(
        wide[:, : heads * dim].view(TOKENS, heads, dim),
        torch.randn(TOKENS, heads + 1, generator=rng).to(device)[:, 1:],
        wide[:, heads * dim : (heads + 1) * dim],
        torch.randint(0, NUM_POSITIONS, (TOKENS,), generator=rng).to(device),
        torch.stack((angles.cos(), angles.sin()), dim=1).to(device),
        slots.to(device),
        (torch.rand(dim, generator=rng) + 0.5).to(dtype).to(device),
        torch.randn(dim, generator=rng).to(dtype).to(device),
    )


def run(given: Inputs, target: Target, pages: torch.Tensor, scales: torch.Tensor | None = None) -> IndexQueries:
    return rotate_append_index(
        given.q, given.weights, given.k, given.positions, given.cos_sin, pages, given.slots,
        norm=given.norm, bias=given.bias, eps=EPS, scales=scales, backend=target.backend,
    )  # fmt: skip


def turned(x: torch.Tensor, given: Inputs) -> torch.Tensor:
    """[num_tokens, heads, dim] by its definition, in fp64."""
    half = given.cos_sin.shape[2]
    cos, sin = given.cos_sin.double()[given.positions].unsqueeze(2).unbind(1)
    a, b = x[..., :half], x[..., half : 2 * half]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]), dim=-1)


def wanted_keys(given: Inputs) -> torch.Tensor:
    k = given.k.double()
    away = k - k.mean(-1, keepdim=True)
    normed = away / (away.square().mean(-1, keepdim=True) + EPS).sqrt() * given.norm.double() + given.bias.double()
    return turned(normed.unsqueeze(1), given)[:, 0]


@pytest.mark.parametrize(("heads", "dim", "rope"), [(20, 24, 8), (1, 16, 16), (64, 128, 64)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_norm_turn_and_append(target: Target, heads: int, dim: int, rope: int, dtype: torch.dtype) -> None:
    given = make(target, heads, dim, rope, dtype)
    tolerance = 4e-2 if dtype is torch.bfloat16 else 1e-5
    pages, wanted_q = given.pages(), turned(given.q.double(), given)
    queries = run(given, target, pages)
    assert queries.q is given.q and queries.weights is given.weights
    torch.testing.assert_close(given.q.double(), wanted_q, rtol=0.0, atol=tolerance)
    kept = given.slots >= 0
    got = pages.view(-1, dim)[given.slots[kept]]
    torch.testing.assert_close(got.double(), wanted_keys(given)[kept], rtol=0.0, atol=tolerance)
    assert pages.isnan().any(-1).sum() == NUM_PAGES * PAGE_TOKENS - int(kept.sum())


def test_fp8_keys_with_a_scale_each(target: Target) -> None:
    """The largest element of a key is 448 of its scale; what comes back is off by a sixteenth of an element."""
    given = make(target)
    pages, scales, plain = given.pages(E4M3), given.scales(), given.pages()
    run(given.rows(slice(None)), target, plain)
    run(given, target, pages, scales)
    slots = given.slots[given.slots >= 0]
    wanted, got = (rows.view(-1, rows.shape[-1])[slots].float() for rows in (plain, pages))
    scale = scales.view(-1)[slots]
    torch.testing.assert_close(scale * 448, wanted.abs().amax(-1), rtol=1e-6, atol=0.0)
    error = (got * scale[:, None] - wanted).abs()
    assert bool((error <= wanted.abs() / 16 + scale[:, None] * 2**-9).all())
    assert scales.isnan().sum() == NUM_PAGES * PAGE_TOKENS - slots.shape[0]


@pytest.mark.parametrize(("heads", "dim", "rope"), [(20, 24, 8), (3, 16, 16), (64, 128, 64)])
def test_fp8_queries_with_a_scale_for_each_head(target: Target, heads: int, dim: int, rope: int) -> None:
    """What queries over other pages are, rounded; the scales are in the weights."""
    given = make(target, heads, dim, rope)
    plain = run(given.rows(slice(None)), target, given.pages())
    before = given.q.clone()
    q, weights = run(given, target, given.pages(E4M3), given.scales())
    scales = token_scales(plain.q)
    assert_same_bits(q, saturate(plain.q.float() * scales.reciprocal().unsqueeze(-1)))
    assert_same_bits(weights, given.weights * scales)
    assert_same_bits(given.q, before)


@pytest.mark.parametrize("fp8", [False, True])
def test_bits_do_not_depend_on_other_tokens(target: Target, fp8: bool) -> None:
    given = make(target)
    pages, scales = given.pages(E4M3 if fp8 else None), given.scales() if fp8 else None
    others = [given.rows(slice(token, token + 1)) for token in range(TOKENS)]
    together = run(given, target, pages, scales)
    one_pages, one_scales = given.pages(E4M3 if fp8 else None), given.scales() if fp8 else None
    for token, other in enumerate(others):
        alone = run(other, target, one_pages, one_scales)
        for one, all_tokens in zip(alone, together, strict=True):
            assert_same_bits(one[0], all_tokens[token])
    assert_same_bits(one_pages.view(torch.uint8), pages.view(torch.uint8))
    if scales is not None and one_scales is not None:
        assert_same_bits(one_scales, scales)


def test_no_token_changes_nothing(target: Target) -> None:
    given = make(target).rows(slice(0, 0))
    pages = given.pages()
    run(given, target, pages)
    assert pages.isnan().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(2, 9)}, "pages: shape must be"),
        ({"q": torch.zeros(2, 4, 9)}, "q: shape must be"),
        ({"q": torch.zeros(2, 4, 8).bfloat16()}, "q: dtype"),
        ({"pages": torch.zeros(9, 16, 8).to(E4M3)}, "scales: fp8 pages need them"),
        ({"scales": torch.zeros(9, 16)}, "scales: fp8 pages need them and others take none"),
        ({"weights": torch.zeros(2, 3)}, "weights: shape"),
        ({"norm": torch.zeros(7)}, "norm: shape"),
        ({"bias": torch.zeros(8, dtype=torch.int32)}, "bias: dtype"),
        ({"cos_sin": torch.zeros(9, 2, 5)}, "cos_sin: must turn 1 to 8 elements, got 10"),
        ({"positions": torch.zeros(3, dtype=torch.int32)}, "positions: shape"),
        ({"slot_mapping": torch.zeros(2, dtype=torch.int32)}, "slot_mapping: dtype"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "q": torch.zeros(2, 4, 8),
        "weights": torch.zeros(2, 4),
        "k": torch.zeros(2, 8),
        "positions": torch.zeros(2, dtype=torch.int32),
        "cos_sin": torch.zeros(9, 2, 2),
        "pages": torch.zeros(9, 16, 8),
        "slot_mapping": torch.zeros(2, dtype=torch.int64),
        "norm": torch.zeros(8),
        "bias": torch.zeros(8),
        "eps": EPS,
    }
    with pytest.raises(KernelArgumentError, match=message):
        rotate_append_index(**{**arguments, **change})
