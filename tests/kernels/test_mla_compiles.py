"""Latent attention's kernels compile for Hopper without a GPU: wgmma, nothing serialised, nothing spilled."""

import re
from pathlib import Path

import pytest

from tests.examples import thorough, usual
from tests.kernels.conftest import INTERPRETING
from tests.kernels.gluon_compile import check_waits, compile_gluon, descriptor
from tests.kernels.test_compiles import compile_for_hopper

triton = pytest.importorskip("triton")

pytestmark = pytest.mark.skipif(INTERPRETING, reason="the interpreter compiles nothing")

SHARED_BYTES = 227 << 10
FLOATS = ("lse", "acc", "row_max", "row_sum", "sum", "stats", "levels", "tops", "tile_sums")
HALVES = ("q", "k_nope", "k_rope", "v", "out", "pages", "x", "weight", "weights", "parts", "nodes")

PREFILL = {
    "HEADS": 128, "BLOCK": 128, "STAGES": 2, "MODE": 1, "RESUMES": False, "SUSPENDS": False, "WANTS_LSE": True,
}  # fmt: skip
DECODE = {
    "HEADS": 128, "PAGE": 64, "LEAF": 1024, "SHORT": 0, "TILE": 64, "STAGES": 2, "MULTI": True, "SLOT_ROWS": 64,
    "WANTS_LSE": True,
}  # fmt: skip
DECODES = {
    "many heads": {},
    "one query": {"MULTI": False, "LEAF": 1280, "SHORT": 1024},
    "large pages": {"PAGE": 256},
    "small pages": {"PAGE": 16},
    "smallest pages": {"PAGE": 8},
    "few heads": {"HEADS": 8, "SLOT_ROWS": 8, "PAGE": 16},
    "no sums": {"MULTI": False, "LEAF": 1152, "SHORT": 1024, "PAGE": 16, "WANTS_LSE": False},
}
RUN = {name: value for name, value in DECODE.items() if name not in ("LEAF", "SHORT")} | {"TOGETHER": False}
RUNS = {
    "one query": {"MULTI": False, "WANTS_LSE": False},
    "small pages": {"PAGE": 16},
    "smallest pages": {"PAGE": 8},
    "48 heads": {"HEADS": 48, "SLOT_ROWS": 48, "MULTI": False},
    "one query, folded together": {"MULTI": False, "WANTS_LSE": False, "TOGETHER": True},
    "small pages, folded together": {"PAGE": 16, "TOGETHER": True},
    "smallest pages, folded together": {"PAGE": 8, "TOGETHER": True},
    "48 heads, folded together": {"HEADS": 48, "SLOT_ROWS": 48, "MULTI": False, "TOGETHER": True},
}
FEW_RUN = {
    "HEADS": 16, "PAGE": 64, "TILE": 64, "STAGES": 2, "ROWS": 16, "SLOT_ROWS": 16, "TOGETHER": True, "EARLY": True,
    "WANTS_LSE": True,
}  # fmt: skip
FEW_RUNS = {
    "16 heads": {},
    "8 heads": {"HEADS": 8, "SLOT_ROWS": 8},
    "32 heads": {"HEADS": 32, "ROWS": 32, "SLOT_ROWS": 32},
    "20 heads, smallest pages": {"HEADS": 20, "ROWS": 32, "SLOT_ROWS": 20, "PAGE": 8},
    "few sequences": {"EARLY": False},
    "no sums, a launch behind": {"WANTS_LSE": False, "TOGETHER": False},
}
FEW = {
    "HEADS": 16, "PAGE": 64, "LEAF": 640, "SHORT": 512, "LEAVES_PER_GROUP": 8, "TILE": 64, "STAGES": 2,
    "WANTS_LSE": True,
}  # fmt: skip
FEWS = {
    "16 heads": {},
    "8 heads": {"HEADS": 8},
    "smallest pages": {"PAGE": 8},
    "no sums": {"WANTS_LSE": False},
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


def pointer(name: str) -> str:
    stem = name.removesuffix("_ptr")
    return "*fp32" if stem in FLOATS else "*bf16" if stem in HALVES else "*i32"


def kinds(names: list[str], boxes: dict[str, list[int]]) -> dict[str, str]:
    pointers = {name: pointer(name) for name in names if name.endswith("_ptr")}
    return pointers | {name: descriptor("bf16", box) for name, box in boxes.items()} | {"scale_log2": "fp32"}


@pytest.mark.parametrize(
    ("resumes", "suspends", "idles"),
    [
        (False, False, False),
        (True, True, False),
        (False, False, True),
        thorough(False, True, False),
        thorough(True, False, False),
        thorough(True, True, True),
    ],
)
def test_prefill(resumes: bool, suspends: bool, idles: bool) -> None:
    from kernels.mla_prefill.hopper.kernel import attend_ragged

    boxes = {"q_nope_desc": [64, 128], "q_rope_desc": [64, 64], "k_rope_desc": [128, 64]}
    boxes |= {"k_nope_desc": [128, 128], "v_desc": [128, 128]}
    constants = {**PREFILL, "RESUMES": resumes, "SUSPENDS": suspends, "IDLES": idles}
    # As it is launched.
    types = kinds(attend_ragged.arg_names, boxes)
    got = compile_gluon(attend_ragged, constants, types, enable_fp_fusion=False)
    check_waits(got, partitions=True)
    assert "wgmma.mma_async" in got.ptx and not got.serialised
    assert got.shared_bytes <= SHARED_BYTES
    assert not got.spills
    # Of both consumers: whether a warp looks for maxima, whether a base moves, and whether by far.
    assert got.ptx.count("vote.sync.all.pred") == (12 if resumes else 6)


@pytest.mark.parametrize("name", usual(DECODES, "many heads"))
def test_decode(name: str) -> None:
    from kernels.mla_decode.hopper.kernel import attend_latents

    constants = DECODE | DECODES[name]
    height = min(int(constants["PAGE"]), int(constants["TILE"]))
    boxes = {"q_half_desc": [64, 256], "q_rope_desc": [64, 64], "half_desc": [height, 256], "rope_desc": [height, 64]}
    got = compile_gluon(attend_latents, constants, kinds(attend_latents.arg_names, boxes))
    assert "wgmma.mma_async" in got.ptx and not got.serialised
    assert got.shared_bytes <= SHARED_BYTES
    assert not got.spills
    # Sums of leaves go to memory in 16 bits, 16 bytes a thread.
    assert "st.global.v4.b32" in got.ptx and "ld.global.cg.v4.b32" in got.ptx
    assert not re.search(r"\b(atom|red)\.\S*f32", got.ptx)


APART = {"HEADS": 128, "PAGE": 64, "LEAF": 1280, "SHORT": 1024, "TILE": 64}
APARTS = {"128 heads": {}, "48 heads": {"HEADS": 48}, "smallest pages": {"PAGE": 8}}


@pytest.mark.parametrize("name", usual(APARTS, "128 heads"))
def test_weights_and_values_apart(name: str) -> None:
    from kernels.mla_decode.hopper.apart import PROGRAMS, REGISTERS, STAGES
    from kernels.mla_decode.hopper.columns_kernel import sum_columns
    from kernels.mla_decode.hopper.tile_kernel import weigh_latents

    shape = APART | APARTS[name]
    height, tiles = min(shape["PAGE"], 64), -(-shape["HEADS"] // 64)
    boxes = {"q_half_desc": [64, 256], "q_rope_desc": [64, 64], "half_desc": [height, 256], "rope_desc": [height, 64]}
    types = kinds(weigh_latents.arg_names, boxes)
    weights = compile_gluon(weigh_latents, shape | {"STAGES": 3 - tiles}, types, maxnreg=REGISTERS)
    built = [(weights, 1)]
    for columns, stages in STAGES.items():
        types = kinds(sum_columns.arg_names, {"weights_desc": [64, 64], "columns_desc": [height, columns]})
        constants = {"STAGES": stages, "COLUMNS": columns, "SLOT_ROWS": 64, "WANTS_LSE": True}
        built.append((compile_gluon(sum_columns, shape | constants, types, maxnreg=REGISTERS), PROGRAMS))
    for got, programs in built:
        assert "wgmma.mma_async" in got.ptx and not got.serialised
        assert got.shared_bytes <= SHARED_BYTES // programs
        assert not got.spills


@pytest.mark.parametrize("name", usual(RUNS, "48 heads, folded together"))
def test_decode_cut_by_load(name: str) -> None:
    from kernels.mla_decode.hopper.runs_kernel import attend_runs

    constants = RUN | RUNS[name]
    height = min(int(constants["PAGE"]), int(constants["TILE"]))
    boxes = {"q_half_desc": [64, 256], "q_rope_desc": [64, 64], "half_desc": [height, 256], "rope_desc": [height, 64]}
    got = compile_gluon(attend_runs, constants, kinds(attend_runs.arg_names, boxes))
    assert "wgmma.mma_async" in got.ptx and not got.serialised
    assert got.shared_bytes <= SHARED_BYTES
    assert not got.spills


@pytest.mark.parametrize("name", usual(FEWS, "smallest pages"))
def test_decode_of_few_heads(name: str) -> None:
    from kernels.mla_decode.hopper.few_kernel import attend_latents_few
    from kernels.mla_decode.hopper.launch import ENTRY_REGISTERS

    constants = FEW | FEWS[name]
    height = min(int(constants["PAGE"]), int(constants["TILE"]))
    boxes = {"q_half_desc": [16, 256], "q_rope_desc": [16, 64], "half_desc": [height, 256], "rope_desc": [height, 64]}
    types = kinds(attend_latents_few.arg_names, boxes)
    got = compile_gluon(attend_latents_few, constants, types, maxnreg=ENTRY_REGISTERS)
    assert "wgmma.mma_async" in got.ptx and not got.serialised
    assert got.shared_bytes <= SHARED_BYTES
    assert not got.spills


@pytest.mark.parametrize("name", usual(FEW_RUNS, "20 heads, smallest pages"))
def test_decode_of_few_heads_cut_by_load(name: str) -> None:
    from kernels.mla_decode.hopper.few_runs_kernel import attend_few_runs
    from kernels.mla_decode.hopper.launch import ENTRY_REGISTERS

    constants = FEW_RUN | FEW_RUNS[name]
    rows, height = int(constants["ROWS"]), min(int(constants["PAGE"]), int(constants["TILE"]))
    boxes = {"q_half_desc": [rows, 256], "q_rope_desc": [rows, 64]}
    boxes |= {"half_desc": [height, 256], "rope_desc": [height, 64], "parts_desc": [1, 64, 256]}
    types = kinds(attend_few_runs.arg_names, boxes)
    got = compile_gluon(attend_few_runs, constants, types, maxnreg=ENTRY_REGISTERS)
    assert "wgmma.mma_async" in got.ptx and not got.serialised
    assert got.shared_bytes <= SHARED_BYTES
    assert not got.spills


TILE = {
    "HEADS": 16, "MODE": 0, "RESUMES": True, "SUSPENDS": True, "WANTS_LSE": False, "BLOCK_M": 64, "BLOCK_N": 128,
    "NOPE": 128, "ROPE": 64, "VALUE": 128, "BLOCK_NOPE": 128, "BLOCK_ROPE": 64, "BLOCK_VALUE": 128,
}  # fmt: skip


def test_wide_heads_fit() -> None:
    """Of GLM-4.7-Flash, in tiles of half as many keys."""
    from kernels.mla_prefill.triton import attend_tile

    wide = {"HEADS": 20, "NOPE": 192, "VALUE": 256, "BLOCK_NOPE": 256, "BLOCK_VALUE": 256, "BLOCK_N": 64}
    built = compile_for_hopper(attend_tile, TILE | wide, 8, pointer, num_stages=2)
    assert not built.spills and built.shared_bytes <= SHARED_BYTES


def test_the_plain_kernels_spill_nothing() -> None:
    from kernels.head_linear import triton as head
    from kernels.mla_decode.hopper.fold import fold_shared
    from kernels.mla_decode.hopper.fold_cuts import fold_cuts
    from kernels.mla_decode.plan_triton import list_items
    from kernels.mla_decode.splits_triton import list_runs
    from kernels.mla_decode.triton import attend_leaf, fold_leaves
    from kernels.mla_prefill.plan_triton import order_tiles
    from kernels.mla_prefill.triton import attend_tile

    leaf = {"HEADS": 16, "LEAF": 1024, "MULTI": True, "TILES": 1, "ROWS": 16, "LATENT": 512, "BLOCK_LATENT": 512}
    fold = {**leaf, "LEAVES_PER_GROUP": 8, "WANTS_LSE": True}
    tree = {"LEAF": 512, "SHORT": 0, "SHORT_LEAVES": 4, "TILE": 64, "LEAVES_PER_GROUP": 8}
    listed = {**tree, "HEADS": 16, "ROWS": 16, "MULTI": True, "BY_LEAF": False, "SEQS": 256, "STEP": 64}
    runs = {"HEADS": 128, "ROWS": 64, "MULTI": True, "SEQS": 1024, "STEP": 64}
    runs |= {"TILE": 64, "EXTRA": 4, "SLACK": 16, "SLOT_ROWS": 64, "PIECES": 4, "PIECE_ROWS": 16, "FEW": False}
    cuts = {"HEADS": 128, "SLOT_ROWS": 64, "MOST": 256, "LATENT": 512, "FEW": False, "WANTS_LSE": True}
    product = {"BLOCK_K": 64, "CARRIED": 64, "BLOCK_C": 64}
    few, held, large = (
        {**product, "BLOCK_T": tile.tokens, "BLOCK_N": tile.columns} for tile in (head.FEW, head.HELD, head.LARGE)
    )
    cases = (
        (head.multiply_heads, {**few, "K": 128, "N": 512, "OVERLAPS": True}, head.FEW.warps),
        (
            head.multiply_heads,
            {**large, "K": 512, "N": 128, "CARRIED": 0, "BLOCK_C": 1, "OVERLAPS": False},
            head.LARGE.warps,
        ),
        (head.multiply_held, {**held, "K": 192, "N": 512, "STAGES": head.HELD_STAGES}, head.HELD.warps),
        (attend_leaf, {**leaf, "PAGE": 1, "BLOCK_N": 32, "ROPE": 64, "BLOCK_ROPE": 64}, 8),
        (fold_leaves, fold, 4),
        (
            fold_shared,
            {
                "HEADS": 16,
                "LEAVES_PER_GROUP": 8,
                "WHOLE": False,
                "LEVELS": 0,
                "ROWS": 16,
                "SLOT_ROWS": 16,
                "LATENT": 512,
                "WANTS_LSE": True,
            },
            4,
        ),
        (attend_tile, TILE, 8),
        (list_items, listed, 4),
        (list_items, {**listed, "LEAF": 1024, "HEADS": 128, "ROWS": 64}, 4),
        (list_runs, runs, 4),
        (list_runs, {**runs, "HEADS": 16, "ROWS": 16, "MULTI": False, "FEW": True, "SLOT_ROWS": 16}, 4),
        (fold_cuts, {**cuts, "SOME": 16, "COLUMNS": 512}, 4),
        (fold_cuts, {**cuts, "SOME": 32, "COLUMNS": 256}, 4),
        (order_tiles, {"MODE": 1, "BLOCK": 128, "SEQS": 256, "SLOTS": 16}, 8),
    )
    for function, constants, num_warps in cases:
        built = compile_for_hopper(function, constants, num_warps, pointer)
        assert not built.spills, function.__name__


@pytest.mark.parametrize("levels", [0, 8])
def test_fold_of_parts_of_16_bits(levels: int) -> None:
    from kernels.mla_decode.hopper.fold import WARPS, fold_shared

    constants: dict[str, object] = {"HEADS": 128, "LEAVES_PER_GROUP": 8, "WHOLE": True, "LEVELS": levels, "ROWS": 64}
    constants |= {"SLOT_ROWS": 64, "LATENT": 512, "WANTS_LSE": True}
    built = compile_for_hopper(
        fold_shared, constants, WARPS, lambda name: "*bf16" if name == "acc_ptr" else pointer(name)
    )
    assert not built.spills


def test_project_latents() -> None:
    from kernels.project_latents.hopper import BLOCK_K
    from kernels.project_latents.hopper.kernel import BLOCK_M, project
    from kernels.project_latents.hopper.launch import BLOCK_N, STAGES

    kinds = {
        "latents_desc": descriptor("bf16", [BLOCK_M.value, BLOCK_K]),
        "weight_desc": descriptor("bf16", [BLOCK_N, BLOCK_K]),
        "out_desc": descriptor("bf16", [BLOCK_M.value // 2, BLOCK_N]),
        "num_latents_ptr": "*i32",
    }
    constants = {"DEPTH": 512, "BLOCK_N": BLOCK_N, "BLOCK_K": BLOCK_K, "STAGES": STAGES}
    built = compile_gluon(project, constants, kinds)
    check_waits(built, partitions=True)
    assert "wgmma.mma_async" in built.ptx and "cp.async.bulk.tensor" in built.ptx and not built.serialised
    assert not built.spills and built.shared_bytes <= SHARED_BYTES
