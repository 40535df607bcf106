"""The kernels of linear and skinny_linear compile for Hopper without a GPU, spill nothing and overlap launches."""

from pathlib import Path

import pytest

from tests.kernels.conftest import INTERPRETING
from tests.kernels.test_compiles import HOPPER, assemble, compile_for_hopper

triton = pytest.importorskip("triton")

pytestmark = pytest.mark.skipif(INTERPRETING, reason="the interpreter compiles nothing")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


def skinny_ptx(rows: int, stages: int) -> tuple[str, int]:
    """PTX of the skinny kernel for so many rows, and the shared memory that a program takes."""
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from kernels.skinny_linear.kernel import BLOCK_K, BLOCK_N, NUM_WARPS, multiply_rows

    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    constants = {"ROWS": rows, "BLOCK_N": BLOCK_N, "BLOCK_K": BLOCK_K, "STAGES": stages, "HAS_BIAS": True}
    kinds = {
        "weight_desc": f"tensordesc<bf16[{BLOCK_N}, {BLOCK_K}],{layout!r}>",
        "x_desc": f"tensordesc<bf16[{rows}, {BLOCK_K}],{layout!r}>",
    }
    names = multiply_rows.arg_names
    other = {name: "*bf16" if name.endswith("_ptr") else "i32" for name in names}
    signature = {name: "constexpr" if name in constants else kinds.get(name, other[name]) for name in names}
    places = {(names.index(name),): value for name, value in constants.items()}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name.endswith("_ptr")}
    source = GluonASTSource(multiply_rows, signature, places, aligned)
    options = {"num_warps": NUM_WARPS, "launch_pdl": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", HOPPER, 32), options=options)
    return str(compiled.asm["ptx"]), int(compiled.metadata.shared)


@pytest.mark.parametrize("rows", [8, 16, 32, 64])
@pytest.mark.parametrize("tiles", [64, 448])
def test_skinny(rows: int, tiles: int, tmp_path: Path) -> None:
    from kernels.skinny_linear.kernel import stages_for

    ptx, shared_bytes = skinny_ptx(rows, stages_for(rows, tiles, 132))
    report = assemble(ptx, tmp_path)
    assert "wgmma.mma_async" in ptx and "cp.async.bulk.tensor" in ptx
    # The weights are asked for before the kernel ahead has ended, x only then.
    assert ptx.index("cp.async.bulk.tensor") < ptx.index("griddepcontrol.wait") < ptx.index("wgmma.mma_async")
    assert "0 bytes spill stores, 0 bytes spill loads" in report and "serialized" not in report
    assert shared_bytes <= 227 * 1024


def test_tiled(tmp_path: Path) -> None:
    from kernels.linear.kernel import BLOCK_K, BLOCK_M, BLOCK_N, GROUP_M, multiply_tile

    constants = {"BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N, "BLOCK_K": BLOCK_K, "GROUP_M": GROUP_M, "HAS_BIAS": True}
    ptx = compile_for_hopper(multiply_tile, constants, num_warps=4)
    assert "wgmma.mma_async" in ptx
    assert "0 bytes spill stores, 0 bytes spill loads" in assemble(ptx, tmp_path)
