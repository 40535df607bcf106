"""The kernels of expert layers, compiled for Hopper without a GPU: no spill, no wait after every product."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from kernels.grouped_linear import TILE_ROWS
from kernels.route_experts import RoutingRule, Scoring
from tests.examples import thorough, usual
from tests.kernels.conftest import INTERPRETING
from tests.kernels.gluon_compile import check_waits, compile_gluon, descriptor
from tests.kernels.test_compiles import compile_for_hopper, own_cache

pytest.importorskip("triton")

pytestmark = pytest.mark.skipif(INTERPRETING, reason="the interpreter compiles nothing")

__all__ = ["own_cache"]

SIXTEEN_BITS = ("bf16", "fp16")
# A product whose first operand is four registers, not the address of a tile.
FROM_REGISTERS = re.compile(r"wgmma\.mma_async[^;]*\}, \{%r\d+,\s*%r\d+,\s*%r\d+,\s*%r\d+\}")
# What the programs on one multiprocessor may take together of its shared memory.
SHARED_BYTES = 227 << 10


def kinds(values: str, **others: str) -> Callable[[str], str]:
    """The types of pointers: `others` by their beginnings, the rest to `values`."""
    return lambda name: next((kind for start, kind in others.items() if name.startswith(start)), f"*{values}")


@pytest.mark.parametrize(
    ("experts", "rule", "has_bias"),
    [
        (512, RoutingRule(10, renormalise=True), False),
        (160, RoutingRule(6, scale=16.0, num_groups=8, top_groups=3), False),
        (256, RoutingRule(8, Scoring.SIGMOID, True, 2.5, num_groups=8, top_groups=4, group_best=2), True),
        (384, RoutingRule(6, Scoring.SQRT_SOFTPLUS, True, 2.5), True),
    ],
    ids=["512 experts", "DeepSeek V2", "DeepSeek V3", "DeepSeek V4"],
)
def test_routing(experts: int, rule: RoutingRule, has_bias: bool) -> None:
    from kernels.route_experts.triton import constants, route_rows

    pointer = kinds("fp32", ids_ptr="*i32")
    # A fused shared expert is two stores more, whatever the rule.
    fused = ((True, True),) if rule.num_groups == 1 and has_bias else ()
    for chooses, fused_shared in ((True, False), (False, False), *fused):
        given = constants(rule, experts, has_bias, chooses, fused_shared)
        built = compile_for_hopper(route_rows, {**given, "OVERLAPS": True}, 1, pointer)
        assert not built.spills
        check_waits(built)


@pytest.mark.parametrize("values", ["bf16", thorough("fp16"), "fp32"])
@pytest.mark.parametrize("rows", usual(TILE_ROWS, 16, 128))
def test_products(values: str, rows: int) -> None:
    """Tensor cores multiply 16 bits in one kind of instruction whatever the tile: 64 outputs and 16 steps of depth."""
    from kernels.grouped_linear.triton import PLAIN, multiply_pairs, tile_for

    tile = tile_for({"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[values], rows)
    constants = {"PAIRS_OF_ROW": 8, "TILE_ROWS": rows, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k}
    indices = dict.fromkeys(("order", "starts", "tiles", "num_tiles"), "*i32")
    built = compile_for_hopper(
        multiply_pairs,
        {**constants, "HAS_BIAS": True, "FORMAT": PLAIN.value, "OVERLAPS": True},
        tile.num_warps,
        kinds(values, **indices),
        aligned=("depth", "num_outputs"),
        num_stages=tile.num_stages,
    )
    assert not built.spills and not built.serialised
    check_waits(built)
    if values in SIXTEEN_BITS:
        assert set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.(m\d+)n\d+(k\d+)", built.ptx)) == {("m64", "k16")}
        assert "cp.async" in built.ptx
    else:
        assert "mma" not in built.ptx


@pytest.mark.parametrize("name", ["fp8", "mxfp4"])
@pytest.mark.parametrize("rows", usual(TILE_ROWS, 16, 128))
def test_products_with_stored_weights(rows: int, name: str) -> None:
    """The same instruction as with plain weights. Codes are copied asynchronously and multiplied from registers."""
    from kernels.grouped_linear.triton import FP8, MXFP4, multiply_pairs, tile_for

    tile = tile_for(torch.bfloat16, rows, is_stored=True)
    constants = {"PAIRS_OF_ROW": 8, "TILE_ROWS": rows, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k}
    indices = dict.fromkeys(("order", "starts", "tiles", "num_tiles"), "*i32")
    stored = {"weight": "*fp8e4nv", "scales": "*fp32"} if name == "fp8" else {"weight": "*u8", "scales": "*u8"}
    built = compile_for_hopper(
        multiply_pairs,
        {**constants, "HAS_BIAS": True, "FORMAT": (FP8 if name == "fp8" else MXFP4).value, "OVERLAPS": True},
        tile.num_warps,
        kinds("bf16", **indices, **stored),
        aligned=("depth", "num_outputs"),
        unaligned=("stride_scales_row",),
        num_stages=tile.num_stages,
    )
    assert not built.spills
    check_waits(built)
    assert set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.(m\d+)n\d+(k\d+)", built.ptx)) == {("m64", "k16")}
    assert FROM_REGISTERS.search(built.ptx)
    assert "cp.async" in built.ptx and "ldmatrix" not in built.ptx
    assert ("cvt.rn.f16x2.e4m3x2" in built.ptx) == (name == "fp8")


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        (name, rows) if rows in (16, 128) else thorough(name, rows)
        for name in ("fp8", "fp8 in words", "fp8 in words with rests", "mxfp4")
        for rows in TILE_ROWS
    ],
)
def test_products_with_stored_weights_on_hopper(name: str, rows: int) -> None:
    """The same instruction again, from registers; codes come by TMA, and several programs fit on a multiprocessor."""
    from kernels.grouped_linear.hopper import FP8_TILES, FP8_WORDS_TILES, MXFP4_TILES
    from kernels.grouped_linear.hopper.kernel import multiply_stored

    is_mxfp4, has_rests = name == "mxfp4", name == "fp8 in words with rests"
    tile = {"fp8": FP8_TILES, "mxfp4": MXFP4_TILES}.get(name, FP8_WORDS_TILES)[rows]
    sizes = {"TILE_ROWS": rows, "BLOCK_N": tile.block_n, "STEP": tile.step, "STAGES": tile.stages}
    options = {"PAIRS_OF_ROW": 8, "HAS_BIAS": True, "IS_MXFP4": is_mxfp4}
    kind, columns, bits = {"fp8": ("fp8e4nv", 1, 8), "mxfp4": ("i32", 8, 32)}.get(name, ("i32", 4, 32))
    values = descriptor(kind, [tile.block_n, tile.step // columns], bits)
    stored = {"weight_desc": values, "scales_ptr": "*fp32" if name == "fp8" else "*i64" if has_rests else "*i32"}
    indices = dict.fromkeys(("order_ptr", "starts_ptr", "tiles_ptr", "num_tiles_ptr"), "*i32")
    rows_of = dict.fromkeys(("x_ptr", "bias_ptr", "out_ptr"), "*bf16")
    aligned = ("depth", "num_outputs", "stride_x")
    built = compile_gluon(multiply_stored, {**sizes, **options}, {**stored, **indices, **rows_of}, aligned=aligned)
    assert not built.spills and not built.serialised
    check_waits(built)
    assert set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.(m\d+)n\d+(k\d+)", built.ptx)) == {("m64", "k16")}
    assert len(FROM_REGISTERS.findall(built.ptx)) == tile.step // 16 * tile.block_n // 64
    assert "cp.async.bulk.tensor" in built.ptx
    # Words of four times 32 columns, or 16, come from shared memory at once; one product makes two weights.
    assert ("ldmatrix.sync.aligned.m8n8.x4" in built.ptx) == (name != "fp8")
    products = tile.block_n * tile.step // (2 * 4 * 32)
    assert built.ptx.count("mul.rn.bf16x2") == (0 if name == "fp8" else products)
    assert built.ptx.count("fma.rn.bf16x2") == (products if has_rests else 0)
    assert ("cvt.rn.f16x2.e4m3x2" in built.ptx) == (name == "fp8")
    assert 2 * built.shared_bytes <= SHARED_BYTES


@pytest.mark.parametrize("pairs", [128, 1024])
def test_plans_of_few_pairs(pairs: int) -> None:
    from kernels.grouped_linear.plan_triton import FEW_PAIRS, TILES, place_few

    assert pairs in FEW_PAIRS
    constants = {"E": 500, "BLOCK_E": 512, "PAIRS": pairs, "TILES": TILES, "OVERLAPS": True}
    built = compile_for_hopper(place_few, constants, 4, kinds("i32"))
    assert not built.spills
    check_waits(built)


@pytest.mark.parametrize("chunk", [256, thorough(512)])
def test_plans_in_chunks(chunk: int) -> None:
    from kernels.grouped_linear import chunks_triton as plan

    assert chunk in (plan.CHUNK, plan.LARGE_CHUNK)
    sizes = {"E": 500, "BLOCK_E": 512, "CHUNK": chunk, "OVERLAPS": True}
    steps = {"AHEAD": plan.CHUNKS_AHEAD, "COMPARED": plan.COMPARED}
    counted = compile_for_hopper(plan.count_pairs, sizes, plan.NUM_WARPS, kinds("i32"))
    placed = compile_for_hopper(plan.place_chunks, sizes | steps, plan.NUM_WARPS, kinds("i32"))
    for built in (counted, placed):
        assert not built.spills
        check_waits(built)


@pytest.mark.parametrize(("has_shared", "has_gate"), [(False, False), (True, False), (True, True)])
def test_sums(has_shared: bool, has_gate: bool) -> None:
    from kernels.combine_experts.triton import COLUMNS, sum_rows

    constants = {"D": 2880, "TOP_K": 8, "PLACES": 9, "COLUMNS": COLUMNS, "HAS_SHARED": has_shared, "HAS_GATE": has_gate}
    pointers = kinds("bf16", weights="*fp32")
    built = compile_for_hopper(sum_rows, {**constants, "OVERLAPS": True}, 4, pointers, enable_fp_fusion=False)
    assert not built.spills and "ld.global.v4" in built.ptx and "fma" not in built.ptx
    check_waits(built)
