"""The kernel of linear compiles for Hopper without a GPU and spills nothing."""

from pathlib import Path

import pytest

from tests.kernels.conftest import INTERPRETING
from tests.kernels.test_compiles import compile_for_hopper

triton = pytest.importorskip("triton")

pytestmark = pytest.mark.skipif(INTERPRETING, reason="the interpreter compiles nothing")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


def test_tiled() -> None:
    from kernels.linear.triton import BLOCK_K, BLOCK_M, BLOCK_N, GROUP_M, multiply_tile

    constants = {"BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N, "BLOCK_K": BLOCK_K, "GROUP_M": GROUP_M, "HAS_BIAS": True}
    built = compile_for_hopper(multiply_tile, constants, num_warps=4)
    assert "wgmma.mma_async" in built.ptx
    assert not built.spills
    # Routers compute in fp32: their products are not cut to the 10 bits of mantissa that tf32 has.
    wide = compile_for_hopper(multiply_tile, constants, num_warps=4, pointer=lambda name: "*fp32")
    assert "tf32" not in wide.ptx
    assert not wide.spills
