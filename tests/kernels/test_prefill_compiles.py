"""prefill_attention compiles for Hopper on a machine without a GPU: wgmma, no spills, nothing serialised."""

import re
from pathlib import Path

import pytest
import torch

from kernels.attention import AttentionSpec
from kernels.fp8 import ScaleKind, Scales
from kernels.layout import KvLayout, PageShape
from kernels.prefill_attention.hopper import halves_tiles
from tests.examples import usual
from tests.kernels.conftest import INTERPRETING
from tests.kernels.gluon_compile import compile_gluon, descriptor
from tests.kernels.test_compiles import SHARED, compile_for_hopper, pointer

triton = pytest.importorskip("triton")

pytestmark = pytest.mark.skipif(INTERPRETING, reason="the interpreter compiles nothing")

TWIN: dict[str, object] = {"STAGES": 2, "WANTS_LSE": True, "HAS_SINKS": True, "CAP": False, "SCALES": 0}
GLUON: dict[str, object] = {
    "HEADS": 8, "GQA_GROUP": 4, "DIM": 128, "D": 128, "PAGE": 16, "HND": False, "PACKED": True, "WINDOW": 0,
    "CAP": False, "BN": 128, "STAGES": 3, "WANTS_LSE": True, "HAS_SINKS": True,
    "SCALES": False, "Q_REGISTERS": True, "HALVES": True,
}  # fmt: skip
CASES: dict[str, dict[str, object]] = {
    "plain": {"HAS_SINKS": False},
    "sinks": {},
    "large pages": {"PAGE": 256},
    "small pages": {"PAGE": 8, "Q_REGISTERS": False},
    "unpacked": {"PACKED": False},
    "odd group": {"GQA_GROUP": 5},
    "softcap": {"CAP": True},
    "dim 64": {"DIM": 64, "D": 64},
    "dim 96": {"DIM": 96},
    "HND": {"HND": True},
    "dim 256": {"DIM": 256, "D": 256, "BN": 64, "STAGES": 2, "Q_REGISTERS": False},
    "window": {"WINDOW": 300, "HALVES": False},
    "window, dim 256": {
        "WINDOW": 300, "HALVES": False, "DIM": 256, "D": 256, "BN": 64, "STAGES": 2, "Q_REGISTERS": False,
    },
    "fp8": {"SCALES": True, "STAGES": 2, "Q_REGISTERS": False},
    "fp8, small pages": {"PAGE": 8, "HALVES": False, "SCALES": True, "STAGES": 2, "Q_REGISTERS": False},
    "fp8, softcap": {
        "SCALES": True, "STAGES": 2, "Q_REGISTERS": False, "CAP": True, "WINDOW": 300, "HALVES": False,
    },
    "dim 256, group 16": {
        "GQA_GROUP": 16, "DIM": 256, "D": 256, "BN": 64, "STAGES": 2, "Q_REGISTERS": False, "WANTS_LSE": False,
        "HAS_SINKS": False,
    },
    "dim 192, small pages, unpacked": {
        "DIM": 192, "D": 256, "PAGE": 8, "HALVES": False, "PACKED": False, "CAP": True, "BN": 64, "STAGES": 2,
        "Q_REGISTERS": False,
    },
    "fp8, every option": {
        "DIM": 80, "PAGE": 8, "HND": True, "WINDOW": 300, "HALVES": False, "CAP": True, "SCALES": True, "STAGES": 2,
        "Q_REGISTERS": False,
    },
    "fp8, fp16, group 2, unpacked": {
        "DIM": 80, "GQA_GROUP": 2, "PACKED": False, "CAP": True, "WANTS_LSE": False, "SCALES": True, "STAGES": 2,
        "Q_REGISTERS": False,
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


TWINS: dict[str, dict[str, object]] = {
    "plain": {},
    "softcap": {"CAP": True},
    "dim 256, every option": {"D": 256, "LAYOUT": 2, "WINDOW": 300, "CAP": True},
    "dim 192, codes and their own scales": {"D": 192, "LAYOUT": 2, "X": 16, "WINDOW": 300, "CAP": True, "SCALES": 2},
    "dim 256, fp32": {"D": 256, "X": 4},
}


@pytest.mark.parametrize("name", usual(TWINS, "plain", "dim 192, codes and their own scales"))
def test_the_plain_kernel_uses_wgmma_and_spills_nothing(name: str) -> None:
    from kernels.prefill_attention.triton import attend_tile, tile_shape

    constants = {**SHARED, **TWIN, **TWINS[name]}
    dim = int(str(constants["D"]))
    rows, keys = tile_shape(dim, wide="own scales" in name or "fp32" in name)
    constants |= {"BLOCK_M": rows, "BLOCK_N": keys, "BLOCK_D": 128 if dim <= 128 else 256}

    def kind(pointed: str) -> str:
        if constants["SCALES"] and "pages" in pointed:
            return "*fp8e4nv"
        plain = pointer(pointed)
        return "*fp32" if "fp32" in name and plain == "*bf16" else plain

    built = compile_for_hopper(attend_tile, constants, 8, kind)
    assert "wgmma.mma_async" in built.ptx and "cp.async" in built.ptx
    assert not built.spills


def kinds(constants: dict[str, object], dtype: str) -> dict[str, str]:
    """Types of what is not an int32."""
    dim, group, rows = (int(str(constants[name])) for name in ("D", "GQA_GROUP", "PAGE"))
    rows = min(rows, int(str(constants["BN"])))
    query_box = [64, dim] if constants["PACKED"] else [64 // group, group, dim]
    pointers = {f"{name}_ptr": "*i32" for name in ("tables", "records", "count")}
    pointers |= {"out_ptr": f"*{dtype}", "lse_ptr": "*fp32", "sinks_ptr": "*fp32"}
    pointers |= {"k_scales_ptr": "*fp32", "v_scales_ptr": "*fp32"}
    box = [rows, dim] if constants["DIM"] == dim else [rows, 1, dim]
    pages = descriptor("fp8e4nv", box, 8) if constants["SCALES"] else descriptor(dtype, box)
    descriptors = {"q_desc": descriptor(dtype, query_box), "k_desc": pages, "v_desc": pages}
    return pointers | descriptors | {"scale_log2": "fp32", "cap_log2": "fp32"}


# Published models' heads, and pages of few tokens with fp8: with a window, and without one, where tiles have halves.
USUAL = ("plain", "dim 256", "fp8, every option", "fp8, small pages")


@pytest.mark.parametrize("name", usual(CASES, *USUAL))
def test_the_gluon_kernel_overlaps_its_products_and_keeps_its_registers(name: str) -> None:
    from kernels.prefill_attention.hopper.kernel import attend_tiles

    constants = {**GLUON, **CASES[name]}
    dtype = "fp16" if name == "dim 64" or "fp16" in name else "bf16"
    built = compile_gluon(attend_tiles, constants, kinds(constants, dtype), enable_fp_fusion=False)
    assert built.ptx.count("wgmma.mma_async") and "cp.async.bulk.tensor" in built.ptx
    assert built.stack_bytes == 0 and not built.serialised, built.remarks
    assert built.shared_bytes <= 227 * 1024


def test_tiles_of_these_cases_have_halves_where_those_of_launches_do() -> None:
    scales = Scales(torch.ones(1), torch.ones(1), ScaleKind.PER_TENSOR)
    for name, case in CASES.items():
        constants = {**GLUON, **case}
        page, heads, dim, group, window = (
            int(str(constants[name])) for name in ("PAGE", "HEADS", "DIM", "GQA_GROUP", "WINDOW")
        )
        shape = PageShape(1, page, heads, dim)
        spec = AttentionSpec(
            shape, KvLayout.NHD, heads * group, 1.0, window, scales=scales if constants["SCALES"] else None
        )
        assert halves_tiles(spec) is constants["HALVES"], name


SEGMENTED = {name: CASES[name] for name in ("plain", "sinks", "small pages", "odd group", "dim 96", "fp8", "dim 64")}


# What fp8 changes is in the loop over key tiles, which the kernel above has, too; each case takes 9 s.
@pytest.mark.parametrize("name", usual(SEGMENTED, "plain"))
def test_the_kernel_of_segments_keeps_its_registers(name: str) -> None:
    from kernels.prefill_attention.hopper.segment_kernel import attend_pieces

    constants = {**GLUON, **SEGMENTED[name], "SEGMENT": 8192}
    del constants["WINDOW"], constants["HALVES"]
    types = kinds(constants, "bf16") | {f"{state}_ptr": "*fp32" for state in ("acc", "base", "sum")}
    types |= {f"{number}_ptr": "*i32" for number in ("units", "num_units", "arrivals")}
    built = compile_gluon(attend_pieces, constants, types, enable_fp_fusion=False)
    assert built.ptx.count("wgmma.mma_async") and "cp.async.bulk.tensor" in built.ptx
    # Two to four registers of one partition wait in memory, at a boundary and not in the loop over key tiles.
    assert built.stack_bytes <= 16 and not built.serialised, built.remarks
    assert built.shared_bytes <= 227 * 1024


FEW: dict[str, object] = {
    "HEADS": 8, "GQA_GROUP": 4, "D": 128, "PAGE": 16, "HND": False, "CAP": False, "WANTS_LSE": True, "HAS_SINKS": True,
    "ROWS": 16, "STAGES": 4,
}  # fmt: skip
FEWS: dict[str, dict[str, object]] = {
    "plain": {"WANTS_LSE": False, "HAS_SINKS": False},
    "every option": {"D": 64, "PAGE": 8, "HND": True, "CAP": True},
}


@pytest.mark.parametrize("name", usual(FEWS, "plain"))
def test_the_kernel_of_few_rows_has_room_for_two_programs(name: str) -> None:
    from kernels.prefill_attention.hopper.few.kernel import attend_few

    constants = {**FEW, **FEWS[name]}
    types = {f"{pointer}_ptr": "*bf16" for pointer in ("q", "k", "v", "out", "weights")}
    floats = ("lse", "sinks", "peaks", "decays", "sums", "bases", "acc", "row_sum")
    types |= {f"{pointer}_ptr": "*fp32" for pointer in floats} | {"scale_log2": "fp32", "cap_log2": "fp32"}
    types |= {f"{pointer}_ptr": "*i32" for pointer in ("tables", "records", "extent", "counters")}
    aligned = ("stride_out", "k_page", "v_page")
    built = compile_gluon(attend_few, constants, types, aligned=aligned, enable_fp_fusion=False)
    # Scores, the same scores again, and values.
    assert built.ptx.count("wgmma.mma_async") == 16 * int(str(constants["D"])) // 128 + 8
    assert built.stack_bytes == 0 and not built.serialised, built.remarks
    # 227 KiB and 64 Ki registers are two programs'; the driver takes 1 KiB of each.
    assert built.shared_bytes <= 112 * 1024 and registers(built.remarks) * 128 * 2 <= 1 << 16


def registers(remarks: str) -> int:
    """Returns a thread's registers as they are given out, by eights."""
    return max(-(-int(used) // 8) * 8 for used in re.findall(r"Used (\d+) registers", remarks))


def test_the_measure_of_tiles_compiles_and_spills_nothing() -> None:
    from kernels.prefill_attention.hopper.few.measure import measure_tiles

    constants: dict[str, object] = {"HALF_QUERIES": 16, "KEYS": 128, "TILES": 16}
    built = compile_for_hopper(measure_tiles, constants, num_warps=1, pointer=lambda name: "*i32")
    assert not built.spills


def test_units_compile_and_spill_nothing() -> None:
    from kernels.prefill_attention.splits_triton import FIXED, FOLD, list_units

    constants: dict[str, object] = {"HEADS": 8, "QUERIES": 32, "KEYS": 128, "SEGMENT": 8192, "FIXED": FIXED}
    constants |= {"FOLD": FOLD, "TILES": 256}
    built = compile_for_hopper(list_units, constants, num_warps=4, pointer=lambda name: "*i32")
    assert not built.spills


def test_the_work_list_compiles_and_spills_nothing() -> None:
    from kernels.prefill_attention.plan_triton import CLASSES, list_tiles

    constants: dict[str, object] = {"QUERIES": 32, "KEYS": 128, "CLASSES": CLASSES, "TILES": 64, "SEQS": 32}
    built = compile_for_hopper(list_tiles, constants, num_warps=4, pointer=lambda name: "*i32")
    assert not built.spills
