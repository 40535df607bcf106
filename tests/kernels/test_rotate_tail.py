"""rotate_tail: the last elements of heads turned and turned back in place, the others untouched."""

from __future__ import annotations

import pytest
import torch

from kernels.errors import KernelArgumentError
from kernels.rotate_tail import rotate_tail
from tests.kernels.compare import assert_same_bits
from tests.kernels.inputs import POISON
from tests.kernels.target import Target

TOKENS, POSITIONS = 7, 50


def make(
    target: Target, heads: int, dim: int, turned: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows that are slices of wider ones, positions and a table."""
    rng = torch.Generator().manual_seed(heads)
    wide = torch.randn(TOKENS, heads * dim + 8, generator=rng).to(dtype).to(target.device)
    angles = torch.rand(POSITIONS, turned // 2, generator=rng) * 6.3
    positions = torch.randint(0, POSITIONS, (TOKENS,), generator=rng)
    cos_sin = torch.stack((angles.cos(), angles.sin()), dim=1)
    return wide[:, : heads * dim].view(TOKENS, heads, dim), positions.to(target.device), cos_sin.to(target.device)


def turned_pairs(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, sign: int) -> torch.Tensor:
    """[num_tokens, heads, dim] by its definition, in fp64: pairs as complex numbers."""
    out, turned = x.double(), 2 * cos_sin.shape[2]
    cos, sin = cos_sin.double()[positions].unsqueeze(2).unbind(1)
    pairs = torch.view_as_complex(out[..., -turned:].unflatten(-1, (-1, 2)).contiguous())
    turned_tail = torch.view_as_real(pairs * torch.complex(cos, sign * sin)).flatten(-2)
    return torch.cat((out[..., :-turned], turned_tail), dim=-1)


@pytest.mark.parametrize(("heads", "dim", "turned"), [(20, 24, 8), (1, 16, 16), (5, 96, 12), (64, 128, 64)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("inverse", [False, True])
def test_pairs_turn_in_place(
    target: Target, heads: int, dim: int, turned: int, dtype: torch.dtype, inverse: bool
) -> None:
    x, positions, cos_sin = make(target, heads, dim, turned, dtype)
    before, wanted = x.clone(), turned_pairs(x, positions, cos_sin, -1 if inverse else 1)
    rotate_tail(x, positions, cos_sin, inverse=inverse, backend=target.backend)
    tolerance = 4e-2 if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(x.double(), wanted, rtol=0.0, atol=tolerance)
    assert_same_bits(x[..., : dim - turned], before[..., : dim - turned])


def test_bits_do_not_depend_on_other_tokens(target: Target) -> None:
    x, positions, cos_sin = make(target, 20, 24, 8)
    alone = x.clone()
    rotate_tail(x, positions, cos_sin, backend=target.backend)
    for token in range(TOKENS):
        rotate_tail(alone[token : token + 1], positions[token : token + 1], cos_sin, backend=target.backend)
    assert_same_bits(alone, x)


def test_what_does_not_turn_may_be_anything(target: Target) -> None:
    x, positions, cos_sin = make(target, 3, 24, 8)
    wanted = x.clone()
    rotate_tail(wanted, positions, cos_sin, backend=target.backend)
    x[..., :16] = POISON
    rotate_tail(x, positions, cos_sin, backend=target.backend)
    assert_same_bits(x[..., 16:], wanted[..., 16:])
    assert x[..., :16].isnan().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 16)}, "x: shape"),
        ({"x": torch.zeros(2, 4, 32)[..., ::2]}, "x: the last axis"),
        ({"cos_sin": torch.zeros(9, 2, 9)}, "cos_sin: must turn 2 to 16"),
        ({"cos_sin": torch.zeros(9, 2, 0)}, "cos_sin: must turn 2 to 16"),
        ({"positions": torch.zeros(3, dtype=torch.int64)}, "positions: shape"),
        ({"positions": torch.zeros(2)}, "positions: dtype"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "x": torch.zeros(2, 4, 16),
        "positions": torch.zeros(2, dtype=torch.int64),
        "cos_sin": torch.zeros(9, 2, 4),
    }
    with pytest.raises(KernelArgumentError, match=message):
        rotate_tail(**{**arguments, **change})
