"""The kernels of linear compile for Hopper without a GPU and spill nothing."""

import re
from pathlib import Path

import pytest

from kernels.linear.hopper import Tiles, columns_for, tiles_for
from tests.examples import thorough
from tests.kernels.conftest import INTERPRETING
from tests.kernels.gluon_compile import Assembled, compile_gluon, descriptor
from tests.kernels.test_compiles import compile_for_hopper

# What one program may take of a multiprocessor's shared memory.
SHARED_BYTES = 227 << 10
MULTIPROCESSORS = 132

triton = pytest.importorskip("triton")

pytestmark = pytest.mark.skipif(INTERPRETING, reason="the interpreter compiles nothing")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("rows", "outputs", "dtype"),
    [(8, 8192, "bf16"), (16, 28672, "bf16"), (32, 8192, "bf16"), (64, 8192, "bf16"), (64, 28672, "fp16")],
)
def test_few(rows: int, outputs: int, dtype: str) -> None:
    tiles = tiles_for(rows, outputs, 4096, MULTIPROCESSORS)
    assert tiles.block_n >= 64
    built = built_few(tiles, rows, dtype)
    assert built.ptx.count("wgmma.mma_async") == tiles.block_k // 16 * tiles.block_n // 64


@pytest.mark.parametrize(("rows", "dtype"), [(8, "fp16"), (16, "bf16"), thorough(32, "bf16"), (64, "bf16")])
def test_few_in_narrow_tiles(rows: int, dtype: str) -> None:
    """Each 16 columns of the depth are one product of 64 rows; neighbours of a row are stored together."""
    tiles = tiles_for(rows, 4096, 4096, MULTIPROCESSORS)
    built = built_few(tiles, rows, dtype)
    assert tiles.block_n < 64
    assert built.ptx.count("wgmma.mma_async") == built.ptx.count(f"m64n{tiles.block_n}k16") == tiles.block_k // 16
    assert f"Used {tiles.registers} registers" in built.remarks
    assert built.ptx.count("st.global") == built.ptx.count("st.global.b32") == tiles.block_n // 4


def built_few(tiles: Tiles, rows: int, dtype: str) -> Assembled:
    """Compiles the kernel for few rows: the first weights are on their way before the launch before has ended."""
    from kernels.linear.hopper.kernel import multiply_few

    columns = columns_for(rows)
    sizes = {
        "BLOCK_N": tiles.block_n, "COLUMNS": columns, "BLOCK_K": tiles.block_k, "STAGES": tiles.stages,
        "HAS_BIAS": True,
    }  # fmt: skip
    boxes = {
        "weight_desc": descriptor(dtype, [tiles.block_n, tiles.block_k]),
        "x_desc": descriptor(dtype, [columns, tiles.block_k]),
    }
    kinds = {**boxes, "out_ptr": f"*{dtype}", "bias_ptr": f"*{dtype}"}
    limit = {} if tiles.registers is None else {"maxnreg": tiles.registers}
    aligned = ("stride_out", "num_outputs")
    built = compile_gluon(multiply_few, sizes, kinds, aligned=aligned, launch_pdl=True, **limit)
    assert not built.spills and not built.serialised and not built.stack_bytes
    assert built.shared_bytes <= SHARED_BYTES
    wait, prefetched = built.ptx.index("griddepcontrol.wait"), built.ptx.index("cp.async.bulk.tensor")
    assert prefetched < wait < built.ptx.rindex("cp.async.bulk.tensor")
    return built


@pytest.mark.parametrize(("depth", "outputs", "carried", "by_column"), [(128, 512, 64, False), (512, 128, 0, True)])
@pytest.mark.parametrize("tokens", [8, thorough(16), 64])
def test_few_tokens_of_heads(depth: int, outputs: int, carried: int, by_column: bool, tokens: int) -> None:
    """Matrices are on their way before the launch before has ended, rows are not."""
    from kernels.head_linear.hopper.kernel import multiply_few_tokens
    from kernels.head_linear.hopper.launch import BLOCK_N

    sizes = {
        "K": depth, "N": outputs, "BLOCK_N": BLOCK_N, "TOKENS": tokens, "CARRIED": carried,
        "BLOCK_C": max(carried // 8, 1), "BY_COLUMN": by_column,
    }  # fmt: skip
    kinds = {name: "*bf16" for name in multiply_few_tokens.arg_names if name.endswith("_ptr")}
    built = compile_gluon(multiply_few_tokens, sizes, kinds, aligned=("stride",))
    assert not built.spills and not built.serialised and built.shared_bytes <= SHARED_BYTES
    assert built.ptx.count("wgmma.mma_async") == depth // 16
    first, last = built.ptx.index("cp.async.cg"), built.ptx.rindex("cp.async.cg")
    assert first < built.ptx.rindex("griddepcontrol.wait") < last


def test_tiled() -> None:
    from kernels.linear.triton import BLOCK_K, BLOCK_M, BLOCK_N, GROUP_M, multiply_tile

    constants = {"BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N, "BLOCK_K": BLOCK_K, "GROUP_M": GROUP_M, "HAS_BIAS": True}
    built = compile_for_hopper(multiply_tile, constants, num_warps=4)
    assert "wgmma.mma_async" in built.ptx
    assert not built.spills


@pytest.mark.parametrize("block_m", [16, thorough(32), 64])
@pytest.mark.parametrize("is_whole", [False, True])
def test_fp32_is_multiplied_without_tensor_cores(block_m: int, is_whole: bool) -> None:
    """Factors keep all their bits: every product is a multiply-add of fp32, in one chain for each element."""
    from kernels.linear.fp32.triton import BLOCK_K, SLICE_K, TILES, multiply_slices

    tile = next(tile for tile in TILES if tile.block_m == block_m)
    constants = {"BLOCK_M": block_m, "BLOCK_N": tile.block_n, "BLOCK_K": BLOCK_K, "SLICE_K": SLICE_K}
    built = compile_for_hopper(
        multiply_slices,
        {**constants, "IS_WHOLE": is_whole, "HAS_BIAS": True, "OVERLAPS": True},
        4,
        lambda name: "*fp32",
        aligned=("depth", "width"),
        num_stages=tile.num_stages,
    )
    assert not built.spills
    assert "tf32" not in built.ptx and "mma" not in built.ptx and "cp.async" in built.ptx
    assert not re.search(r"\bmul(\.\w+)*\.f32|\bfma(?!\.rn\.f32)", built.ptx)
    assert len(re.findall(r"\bfma\.rn\.f32\b", built.ptx)) == tile.block_n * block_m * BLOCK_K // 128


@pytest.mark.parametrize("block_m", [16, thorough(32), thorough(64)])
def test_what_comes_before_and_after_fp32_slices(block_m: int) -> None:
    from kernels.linear.fp32.triton import SLICES_AHEAD, SUM_BLOCK_N, sum_slices, transpose_rows

    constants = {"BLOCK_M": block_m, "BLOCK_N": SUM_BLOCK_N, "AHEAD": SLICES_AHEAD, "HAS_BIAS": True}
    constants["OVERLAPS"] = True
    summed = compile_for_hopper(sum_slices, constants, 4, lambda name: "*fp32", aligned=("width",))
    assert not summed.spills and "fma.rn.f32" not in summed.ptx
    constants = {"BLOCK_M": block_m, "BLOCK_K": 64, "OVERLAPS": True}
    for dtype in ("fp32", "bf16"):
        kinds = {"x_ptr": f"*{dtype}", "transposed_ptr": "*fp32"}
        transposed = compile_for_hopper(transpose_rows, constants, 4, kinds.__getitem__, aligned=("depth", "width"))
        assert not transposed.spills and "ld.global.v4" in transposed.ptx
