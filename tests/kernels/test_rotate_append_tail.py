"""rotate_append_tail: what the separate ops give, in one launch: norm, turn and slots of keys, queries in place."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from kernels.errors import KernelArgumentError
from kernels.rotate_append_tail import rotate_append_tail
from tests.kernels.compare import assert_same_bits
from tests.kernels.inputs import POISON, far_pages
from tests.kernels.target import Target
from tests.kernels.test_rotate_tail import turned_pairs

EPS, NUM_POSITIONS, NUM_PAGES, PAGE_TOKENS, TOKENS, PADDING = 1e-6, 50, 5, 8, 11, 3


@dataclass(frozen=True, slots=True)
class Inputs:
    q: torch.Tensor
    k: torch.Tensor
    positions: torch.Tensor
    cos_sin: torch.Tensor
    slots: torch.Tensor
    norm: torch.Tensor

    def pages(self) -> torch.Tensor:
        size = (NUM_PAGES, PAGE_TOKENS, self.k.shape[1])
        return torch.full(size, POISON, dtype=self.k.dtype, device=self.q.device)

    def rows(self, rows: slice) -> Inputs:
        parts = (self.q, self.k, self.positions, self.slots)
        q, k, positions, slots = (part[rows].clone() for part in parts)
        return replace(self, q=q, k=k, positions=positions, slots=slots)


def make(
    target: Target, heads: int = 20, dim: int = 24, turned: int = 8, dtype: torch.dtype = torch.bfloat16
) -> Inputs:
    """Rows of one product; one token is padding."""
    rng, device = torch.Generator().manual_seed(0), target.device
    wide = torch.randn(TOKENS, (heads + 1) * dim + 8, generator=rng).to(dtype).to(device)
    angles = torch.rand(NUM_POSITIONS, turned // 2, generator=rng) * 6.3
    slots = torch.randperm(NUM_PAGES * PAGE_TOKENS, generator=rng)[:TOKENS]
    slots[PADDING] = -1
    return Inputs(
        wide[:, : heads * dim].view(TOKENS, heads, dim),
        wide[:, heads * dim : (heads + 1) * dim],
        torch.randint(0, NUM_POSITIONS, (TOKENS,), generator=rng).to(device),
        torch.stack((angles.cos(), angles.sin()), dim=1).to(device),
        slots.to(device),
        (torch.rand(dim, generator=rng) + 0.5).to(dtype).to(device),
    )


def run(given: Inputs, target: Target, pages: torch.Tensor) -> None:
    rotate_append_tail(
        given.q, given.k, given.positions, given.cos_sin, pages, given.slots,
        norm=given.norm, eps=EPS, backend=target.backend,
    )  # fmt: skip


@pytest.mark.parametrize(("heads", "dim", "turned"), [(20, 24, 8), (1, 16, 16), (64, 128, 64)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_norm_turn_and_append(target: Target, heads: int, dim: int, turned: int, dtype: torch.dtype) -> None:
    given = make(target, heads, dim, turned, dtype)
    tolerance = 4e-2 if dtype is torch.bfloat16 else 1e-5
    k = given.k.double()
    normed = k / (k.square().mean(-1, keepdim=True) + EPS).sqrt() * given.norm.double()
    wanted_k = turned_pairs(normed.unsqueeze(1), given.positions, given.cos_sin, 1)[:, 0]
    pages, wanted_q = given.pages(), turned_pairs(given.q, given.positions, given.cos_sin, 1)
    run(given, target, pages)
    torch.testing.assert_close(given.q.double(), wanted_q, rtol=0.0, atol=tolerance)
    kept = given.slots >= 0
    got = pages.view(-1, dim)[given.slots[kept]]
    torch.testing.assert_close(got.double(), wanted_k[kept], rtol=0.0, atol=tolerance)
    assert pages.isnan().any(-1).sum() == NUM_PAGES * PAGE_TOKENS - int(kept.sum())


def test_bits_do_not_depend_on_other_tokens(target: Target) -> None:
    given = make(target)
    pages, one_pages = given.pages(), given.pages()
    others = [given.rows(slice(token, token + 1)) for token in range(TOKENS)]
    run(given, target, pages)
    for token, other in enumerate(others):
        run(other, target, one_pages)
        assert_same_bits(other.q[0], given.q[token])
    assert_same_bits(one_pages, pages)


def test_a_pool_beyond_two_billion_elements(target: Target) -> None:
    given = make(target)
    near, far = given.pages(), far_pages(given.pages())
    run(given.rows(slice(None)), target, far)
    run(given, target, near)
    assert_same_bits(far, near)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 4, 15)}, "q: shape"),
        ({"k": torch.zeros(2, 16, dtype=torch.bfloat16)}, "pages: dtype"),
        ({"pages": torch.zeros(9, 16, 32)}, "pages: shape"),
        ({"norm": torch.zeros(8)}, "norm: shape"),
        ({"cos_sin": torch.zeros(9, 2, 9)}, "cos_sin: must turn 2 to 16"),
        ({"positions": torch.zeros(3, dtype=torch.int64)}, "positions: shape"),
        ({"slot_mapping": torch.zeros(2, dtype=torch.int32)}, "slot_mapping: dtype"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "q": torch.zeros(2, 4, 16),
        "k": torch.zeros(2, 16),
        "positions": torch.zeros(2, dtype=torch.int64),
        "cos_sin": torch.zeros(9, 2, 4),
        "pages": torch.zeros(9, 16, 16),
        "slot_mapping": torch.zeros(2, dtype=torch.int64),
        "norm": torch.ones(16),
        "eps": EPS,
    }
    with pytest.raises(KernelArgumentError, match=message):
        rotate_append_tail(**{**arguments, **change})
