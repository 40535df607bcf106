"""How near is near enough, by dtype, and equality of bits."""

import torch

# An output is a convex combination of values of about 1, at most 4: half-precision weights and one final rounding. Each
# is half a unit in the last place, which is larger for values beyond that.
OUT_TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# Of a row's own size: the longer the context, the smaller its rows, and an answer of zeros is always off by 1.
ROW_TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}
LSE_TOLERANCE = 1e-3


def assert_output(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Every element is finite and near the fp64 truth, and every row is for its size."""
    assert torch.isfinite(got).all()
    if got.numel():
        worst = ((got.double() - wanted.double()).abs() / (wanted.double().abs() / 4).clamp_min(1.0)).max().item()
        assert worst <= OUT_TOLERANCE[got.dtype], f"largest error {worst}"
        error, size = (got.double() - wanted.double()).norm(dim=-1), wanted.double().norm(dim=-1)
        worst = (error / size.clamp_min(1e-12)).max().item()
        assert worst <= ROW_TOLERANCE[got.dtype], f"largest error of a row {worst} of its size"


def assert_lse(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Log-sum-exps agree, minus infinity with minus infinity."""
    assert got.dtype is torch.float32
    torch.testing.assert_close(got.double(), wanted.double(), rtol=0.0, atol=LSE_TOLERANCE)


def assert_attention(got: tuple[torch.Tensor, torch.Tensor], wanted: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Outputs and log-sum-exps agree."""
    assert_output(got[0], wanted[0])
    assert_lse(got[1], wanted[1])


def assert_same_bits(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal bit for bit, NaN with NaN."""
    assert got.shape == wanted.shape and got.dtype is wanted.dtype
    raw = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    assert torch.equal(got.contiguous().view(raw), wanted.contiguous().view(raw))
