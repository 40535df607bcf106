"""project_latents where the number of latents lies on the device: the bits of `linear`, and nothing behind them."""

from __future__ import annotations

import pytest
import torch

from kernels.backend import Backend, is_hopper
from kernels.errors import KernelArgumentError
from kernels.graph_capture import graph_capture
from kernels.linear import linear
from kernels.project_latents import hopper, project_latents
from tests.device_waits import no_device_waits
from tests.kernels.compare import assert_same_bits

NOPE, VALUE, ROPE, LATENT = 128, 128, 64, 512
BOUND, TILE = 700, 128


def made(heads: int, device: str = "cpu", bound: int = BOUND) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents whose rows are parts of wider ones, and a projection."""
    generator = torch.Generator(device).manual_seed(3)
    size = {"generator": generator, "device": device, "dtype": torch.bfloat16}
    wide = torch.randn(bound, LATENT + ROPE + 8, **size)  # type: ignore[call-overload]
    return wide[:, 8:], torch.randn(heads * (NOPE + VALUE), LATENT, **size) * LATENT**-0.5  # type: ignore[call-overload]


def count(number: int, device: str = "cpu") -> torch.Tensor:
    return torch.tensor([number], dtype=torch.int32, device=device)


def test_a_number_on_the_device_changes_no_row() -> None:
    latents, kv_b = made(2)
    wanted = project_latents(latents, kv_b, 2, NOPE, backend=Backend.REFERENCE)
    got = project_latents(latents, kv_b, 2, NOPE, num_latents=count(300), backend=Backend.REFERENCE)
    for one, other in zip(got, wanted, strict=True):
        assert_same_bits(one[:300], other[:300])


def test_what_is_no_number_is_refused_by_name() -> None:
    latents, kv_b = made(2)
    for wrong in (torch.zeros(2, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)):
        with pytest.raises(KernelArgumentError, match="num_latents"):
            project_latents(latents, kv_b, 2, NOPE, num_latents=wrong, backend=Backend.REFERENCE)


def test_what_the_gluon_kernel_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    latents, kv_b = made(2)
    assert "needs a Hopper GPU" in (hopper.reason_against(latents, kv_b) or "")
    monkeypatch.setattr(hopper, "is_hopper", lambda _device: True)
    assert hopper.reason_against(latents, kv_b) is None
    assert "16-bit" in (hopper.reason_against(latents.float(), kv_b.float()) or "")
    assert "whole boxes of 64, got 500" in (hopper.reason_against(latents, kv_b[:, :500].contiguous()) or "")
    assert "multiples of 16 bytes" in (hopper.reason_against(latents[:, 1:], kv_b) or "")


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [128, 16, 20])
class TestOnHopper:
    @pytest.fixture(autouse=True)
    def hopper(self) -> None:
        if not torch.cuda.is_available() or not is_hopper(torch.device("cuda", 0)):
            pytest.skip("needs a Hopper GPU")

    @pytest.mark.parametrize("number", [0, 1, 128, 129, BOUND - 1, BOUND, BOUND + 50])
    def test_the_bits_of_linear_and_nothing_behind(self, heads: int, number: int) -> None:
        """A number beyond the bound is the bound's."""
        from kernels.project_latents.hopper.launch import launch

        latents, kv_b = made(heads, "cuda")
        out = torch.full((BOUND, kv_b.shape[0]), float("nan"), dtype=latents.dtype, device="cuda")
        launch(latents, kv_b, count(number, "cuda"), out)
        written = min(BOUND, -(-number // TILE) * TILE)
        assert_same_bits(out[:number], linear(latents[:number, :LATENT], kv_b))
        assert not out[:written].isnan().any() and bool(out[written:].isnan().all())

    def test_a_captured_launch_follows_the_number(self, heads: int) -> None:
        latents, kv_b = made(heads, "cuda")
        number = count(BOUND, "cuda")
        wanted = linear(latents[:, :LATENT], kv_b)
        with no_device_waits():
            project_latents(latents, kv_b, heads, NOPE, num_latents=number)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with graph_capture(graph):
            got = project_latents(latents, kv_b, heads, NOPE, num_latents=number)
        kv = torch.as_strided(got.k_nope, wanted.shape, (wanted.shape[1], 1))
        for some in (BOUND, 3, 257):
            kv.zero_()
            number.fill_(some)
            graph.replay()
            assert_same_bits(kv[:some], wanted[:some])
            assert not kv[-(-some // TILE) * TILE :].any()
