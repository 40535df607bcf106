"""The kernels of recurrent states, compiled for Hopper without a GPU: no spill, wide accesses where they move data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.examples import thorough
from tests.kernels.conftest import INTERPRETING
from tests.kernels.gluon_compile import check_waits, compile_gluon, descriptor
from tests.kernels.test_compiles import compile_for_hopper, own_cache
from tests.kernels.test_experts_compile import kinds

pytest.importorskip("triton")

pytestmark = pytest.mark.skipif(INTERPRETING, reason="the interpreter compiles nothing")

__all__ = ["own_cache"]

SLOTS = dict.fromkeys(("cu_", "working", "restore", "fresh", "rolling", "leave", "sources", "destinations"), "*i32")


@pytest.mark.parametrize(
    ("channels", "d_conv", "values"),
    [(8192, 4, "bf16"), *(thorough(*case) for case in ((2048, 3, "fp32"), (8192, 4, "fp32"), (2048, 3, "bf16")))],
)
def test_convolutions(values: str, channels: int, d_conv: int) -> None:
    from kernels.causal_conv import triton as conv
    from kernels.causal_conv.rows.triton import leave_columns

    shared: dict[str, object] = {"C": channels, "PADDED": 4 if d_conv == 4 else 2}
    constants = {
        **shared, "D_CONV": d_conv, "HAS_BIAS": True, "SILU": True, "LEVELS": 2, "BLOCK_T": conv.TILE_TOKENS,
        "MIXED_T": conv.MIXED_TOKENS, "PACKED": values == "bf16" and d_conv == 4,
        "OVERLAPS": True,
    }  # fmt: skip
    for block, warps in (conv.DECODE_TILE, conv.FEW_TILE, conv.MANY_TILE):
        decodes = (block, warps) == conv.DECODE_TILE
        row = (conv.ONE_CHANNELS if decodes else conv.ROW_CHANNELS) * warps
        options = {"ROW_C": row, "BLOCK_C": block, "DECODES": decodes, "WHOLE": (block, warps) == conv.MANY_TILE}
        built = compile_for_hopper(conv.convolve, {**constants, **options}, warps, kinds(values, **SLOTS))
        *befores, _ = built.ptx.split("griddepcontrol.wait")
        assert len(befores) == 2, "programs of rows and of tiles"
        reads = sorted(before.rpartition("$L__BB")[2].count("ld.global") for before in befores)
        assert reads[-1] <= (5 if constants["PACKED"] else 8 * d_conv + 2), "weights alone"
        assert (reads[0] > 0) is decodes, "tiles of prompts ask for columns first"
        assert "st.global" not in befores[0]
        width = "v4" if decodes or values == "fp32" else "v2"
        assert not built.spills and f"ld.global.{width}" in built.ptx and f"st.global.{width}" in built.ptx
        assert ("ld.global.v2.b64" in built.ptx) is constants["PACKED"], "two channels' weights at a time"
    for warps in {conv.DECODE_TILE[1], conv.FEW_TILE[1]}:
        left = {**shared, "CARRIED": d_conv - 1, "BLOCK_C": conv.ONE_CHANNELS * warps, "OVERLAPS": True}
        built = compile_for_hopper(leave_columns, left, warps, kinds(values, **SLOTS))
        check_waits(built)
        assert not built.spills and "ld.global.v4" in built.ptx and "st.global.v4" in built.ptx


def test_copies() -> None:
    from kernels.copy_states.triton import NUM_WARPS, WORDS, copy_words

    built = compile_for_hopper(copy_words, {"WORDS": WORDS, "OVERLAPS": True}, NUM_WARPS, kinds("i64", **SLOTS))
    assert not built.spills and "ld.global.v2.b64" in built.ptx and "st.global.v2.b64" in built.ptx


SCAN_KINDS = {
    **SLOTS, "blocks": "*i32", "sums": "*fp32", "weights": "*fp32", "states": "*fp32", "g_": "*fp32", "beta": "*fp32",
    "skip": "*fp32", "lengths": "*fp32", "factors": "*fp32", "sizes": "*fp32", "remains": "*fp32",
}  # fmt: skip
# Heads of Qwen3-Next: 16 of keys, 32 of values.
QWEN: dict[str, object] = {"HEADS": 32, "GROUP": 2, "DK": 128, "BK": 128}


# Bamba: one group of 128 heads.
MAMBA2: dict[str, object] = {"HEADS": 128, "GROUP": 128, "DK": 128, "DV": 64, "BK": 128}
SHARED_BYTES = 227 << 10


def scan_kinds(values: str) -> Callable[[str], str]:
    """The gate's pointer begins as that of g does."""
    return lambda name: f"*{values}" if name == "gate_ptr" else kinds(values, **SCAN_KINDS)(name)


@pytest.mark.parametrize("values", ["bf16", thorough("fp16")])
def test_scans(values: str) -> None:
    """Products of 16 bits are wgmmas that nobody waits for one by one."""
    from kernels.block_scan.triton import DELTA_VALUES, STAGES, VALUES, WARPS, scan_blocks

    options = {"PRECISION": "tf32", "HAS_WEIGHTS": True, "HAS_CHANNELS": False, "STAGES": STAGES, "OVERLAPS": True}
    delta = {"HAS_INVERSES": True, "HAS_FACTORS": True, "HAS_SKIP": False, "HAS_GATE": False, "BY_VALUE": False}
    built = compile_for_hopper(
        scan_blocks, {**QWEN, **options, **delta, "DV": 128, "BV": DELTA_VALUES}, WARPS, scan_kinds(values)
    )
    assert not built.spills and "wgmma" in built.ptx and "cp.async" in built.ptx
    assert built.shared_bytes <= SHARED_BYTES // 2, "two programs share a processor"
    check_waits(built)
    mamba2 = {"HAS_INVERSES": False, "HAS_FACTORS": False, "HAS_SKIP": True, "HAS_GATE": False, "BY_VALUE": True}
    built = compile_for_hopper(scan_blocks, {**MAMBA2, **options, **mamba2, "BV": VALUES}, WARPS, scan_kinds(values))
    assert not built.spills and "wgmma" in built.ptx and "cp.async" in built.ptx


def test_stacks_of_fp32() -> None:
    """Factors lie in registers, and the driver keeps a stack for each thread that the card holds: with 14.5 KB each the
    first launch took 3.5 GB, and failed beside other processes."""
    from kernels.block_scan.triton import DELTA_VALUES, WIDE_WARPS, scan_blocks
    from kernels.gated_delta_scan.triton import WIDE_WARPS as SOLVE_WARPS
    from kernels.gated_delta_scan.triton import solve_blocks

    heads: dict[str, object] = {"HEADS": 2, "GROUP": 1, "DK": 72, "BK": 128, "PRECISION": "ieee", "OVERLAPS": True}
    built = compile_for_hopper(solve_blocks, {**heads, "NORM": True, "HALVES": False}, SOLVE_WARPS, scan_kinds("fp32"))
    assert built.stack_bytes <= 2304
    options = {
        "DV": 40, "BV": DELTA_VALUES, "BY_VALUE": False, "STAGES": 1, "HAS_WEIGHTS": True, "HAS_CHANNELS": False,
        "HAS_INVERSES": True, "HAS_FACTORS": True, "HAS_SKIP": False, "HAS_GATE": False,
    }  # fmt: skip
    built = compile_for_hopper(scan_blocks, {**heads, **options}, WIDE_WARPS, scan_kinds("fp32"))
    assert built.stack_bytes <= 4 << 10


@pytest.mark.parametrize("values", ["bf16", thorough("fp16")])
def test_blocks_of_the_delta_rule(values: str) -> None:
    from kernels.gated_delta_scan.triton import WARPS, solve_blocks

    constants = {**QWEN, "NORM": True, "HALVES": True, "PRECISION": "tf32", "OVERLAPS": True}
    built = compile_for_hopper(solve_blocks, constants, WARPS, scan_kinds(values))
    check_waits(built)
    assert not built.spills and "wgmma" in built.ptx


# Heads of Kimi Linear.
KIMI: dict[str, object] = {"HEADS": 32, "GROUP": 1, "DK": 128, "BK": 128}


@pytest.mark.parametrize("values", ["bf16", thorough("fp16")])
def test_scans_by_channel(values: str) -> None:
    from kernels.block_scan.triton import CHANNEL_STAGES, DELTA_VALUES, WARPS, scan_blocks

    options = {
        "PRECISION": "tf32", "HAS_WEIGHTS": False, "HAS_CHANNELS": True, "STAGES": CHANNEL_STAGES, "HAS_INVERSES": True,
        "HAS_FACTORS": False, "HAS_SKIP": False, "HAS_GATE": False, "BY_VALUE": False, "DV": 128, "BV": DELTA_VALUES,
        "OVERLAPS": True,
    }  # fmt: skip
    built = compile_for_hopper(scan_blocks, {**KIMI, **options}, WARPS, scan_kinds(values))
    assert not built.spills and "wgmma" in built.ptx and "cp.async" in built.ptx
    assert built.shared_bytes <= SHARED_BYTES


@pytest.mark.parametrize(
    ("keys", "values"), [(32, 12), (13, 13), *(thorough(*dims) for dims in ((12, 12), (16, 64), (64, 20), (250, 72)))]
)
@pytest.mark.parametrize("kind", ["delta", "channels", "mamba2"])
def test_scans_of_any_size(kind: str, keys: int, values: int) -> None:
    """With another number of stages the assembler reads registers that nobody wrote, which the helper refuses."""
    import torch

    from kernels.block_scan.triton import DELTA_VALUES, VALUES, WARPS, num_stages, padded, scan_blocks

    is_delta, has_channels = kind != "mamba2", kind == "channels"
    stages = num_stages(torch.empty(1, 1, keys, dtype=torch.bfloat16), has_channels)
    heads = {"HEADS": 4, "GROUP": 2, "DK": keys, "BK": padded(keys), "DV": values, "BY_VALUE": not is_delta}
    options = {
        "PRECISION": "tf32", "HAS_WEIGHTS": not has_channels, "HAS_CHANNELS": has_channels, "HAS_INVERSES": is_delta,
        "HAS_FACTORS": kind == "delta", "HAS_SKIP": not is_delta, "HAS_GATE": not is_delta, "STAGES": stages,
        "BV": DELTA_VALUES if is_delta else VALUES, "OVERLAPS": True,
    }  # fmt: skip
    built = compile_for_hopper(scan_blocks, {**heads, **options}, WARPS, scan_kinds("bf16"))
    assert built.shared_bytes <= SHARED_BYTES


def block_options(values: str, *, has_norm: bool, padded: int) -> tuple[dict[str, object], int]:
    """Constants and warps with which blocks by channel are solved."""
    from kernels.gated_delta_scan.channels.triton import CHANNELS, WARPS, WIDE_CHANNELS, WIDE_WARPS

    halves = has_norm and values != "fp32"
    warps, channels = (WARPS, CHANNELS) if halves else (WIDE_WARPS, WIDE_CHANNELS)
    precision = "tf32x3" if values == "fp32" else "tf32"
    options = {"NORM": has_norm, "HALVES": halves, "PRECISION": precision, "CHANNELS": min(channels, padded)}
    options["OVERLAPS"] = True
    return options, warps


@pytest.mark.parametrize(
    ("values", "has_norm", "stack_bytes"),
    [("bf16", True, 1024), thorough("fp16", True, 1024), ("bf16", False, 512), thorough("fp32", True, 704)],
)
def test_blocks_by_channel(values: str, has_norm: bool, stack_bytes: int) -> None:
    """Threads keep 1 KB outside their registers; with 64 channels at a time it is 224 bytes, and takes 8 % longer."""
    from kernels.gated_delta_scan.channels.triton import solve_channels

    options, warps = block_options(values, has_norm=has_norm, padded=128)
    built = compile_for_hopper(solve_channels, {**KIMI, **options}, warps, scan_kinds(values))
    check_waits(built)
    assert built.stack_bytes <= stack_bytes
    assert built.shared_bytes <= SHARED_BYTES // 3
    assert "wgmma" in built.ptx


def test_blocks_by_channel_of_gates_that_are_no_runs_of_16_bytes() -> None:
    """The assembler reads no register that nobody wrote, which the helper refuses."""
    from kernels.gated_delta_scan.channels.triton import solve_channels

    options, warps = block_options("bf16", has_norm=True, padded=32)
    heads = {"HEADS": 5, "GROUP": 1, "DK": 12, "BK": 32}
    unaligned = ("stride_g", "stride_beta")
    built = compile_for_hopper(solve_channels, {**heads, **options}, warps, scan_kinds("bf16"), unaligned=unaligned)
    assert not built.spills


def test_plans_of_scans() -> None:
    from kernels.block_scan.plan_triton import CHUNK, PLACED, count_blocks, place_blocks

    for function, constants in ((count_blocks, {"CHUNK": CHUNK}), (place_blocks, {"CHUNK": PLACED, "LEVELS": 2})):
        built = compile_for_hopper(function, {**constants, "OVERLAPS": True}, 4, kinds("i32"))
        assert not built.spills
        check_waits(built)


@pytest.mark.parametrize("values", ["bf16", thorough("fp32")])
def test_updates(values: str) -> None:
    """States are read and written 16 bytes at a time."""
    from kernels.state_update.triton import VALUES, WARPS, update_delta, update_ssd

    kinds_of = {**SCAN_KINDS, "raw": "*fp32", "bias": "*fp32", "a_": "*fp32"}
    pointer = kinds(values, **{name: kind for name, kind in kinds_of.items() if name != "g_"}, g_ptr="*fp32")
    for channels in (False, True):
        options = {"DV": 128, "NORM": True, "HAS_CHANNELS": channels, "BV": VALUES, "OVERLAPS": True}
        built = compile_for_hopper(update_delta, {**QWEN, **options}, WARPS, pointer)
        check_waits(built)
        assert not built.spills and "ld.global.v4" in built.ptx and "st.global.v4" in built.ptx
    for has_both in (False, True):
        options = {"HAS_BIAS": True, "HAS_SKIP": has_both, "HAS_GATE": has_both, "BV": VALUES, "OVERLAPS": True}
        built = compile_for_hopper(update_ssd, {**MAMBA2, **options}, WARPS, pointer)
        check_waits(built, 2 + has_both)
        assert not built.spills and "ld.global.v4" in built.ptx and "st.global.v4" in built.ptx


def test_blocks_of_mamba2() -> None:
    from kernels.mamba2_scan.triton import HEADS, SHARED_HEADS, score_blocks, sum_steps

    raw = kinds("fp32", raw="*bf16", **dict.fromkeys(("cu_", "blocks"), "*i32"))
    steps = {"H": 128, "HAS_BIAS": True, "BLOCK_H": HEADS, "OVERLAPS": True}
    built = compile_for_hopper(sum_steps, steps, 4, raw)
    assert not built.spills
    check_waits(built)
    constants = {"H": 128, "GROUP": 128, "DK": 128, "PRECISION": "tf32", "BK": 128, "SHARE": SHARED_HEADS}
    constants["OVERLAPS"] = True
    built = compile_for_hopper(score_blocks, constants, 4, scan_kinds("bf16"))
    check_waits(built)
    assert not built.spills and "wgmma" in built.ptx


GLUON_SCANS: dict[str, dict[str, object]] = {
    "delta": {**QWEN, "DV": 128, "HAS_WEIGHTS": True, "HAS_FACTORS": True},
    "delta by channel": {**KIMI, "DV": 128, "HAS_CHANNELS": True},
    "mamba2": {**MAMBA2, "HAS_INVERSES": False, "HAS_WEIGHTS": True, "HAS_SKIP": True, "BY_VALUE": True},
    "mamba2, gate": {
        **MAMBA2, "HAS_INVERSES": False, "HAS_WEIGHTS": True, "HAS_SKIP": True, "HAS_GATE": True, "BY_VALUE": True,
    },
}  # fmt: skip


def gluon_kinds(function: Any, values: str) -> dict[str, str]:
    """Boxes of GRID_TOKENS rows, and the types of pointers."""
    columns = {"q": 128, "k": 128, "kept": 128, "v": 64, "inverses": 64, "scores": 64}
    boxes = {f"{name}_desc": descriptor(values, [64, width]) for name, width in columns.items()}
    pointers = {name: scan_kinds(values)(name) for name in function.arg_names if name.endswith("_ptr")}
    return {**pointers, **boxes, "scale": "fp32", "norm_eps": "fp32"}


@pytest.mark.parametrize("values", ["bf16", thorough("fp16")])
@pytest.mark.parametrize("name", GLUON_SCANS)
def test_gluon_scans(name: str, values: str) -> None:
    from kernels.block_scan.hopper import VALUES, num_stages
    from kernels.block_scan.hopper.kernel import scan_blocks

    options = dict.fromkeys(("HAS_WEIGHTS", "HAS_SKIP", "HAS_GATE", "HAS_FACTORS", "HAS_CHANNELS", "BY_VALUE"), False)
    constants = {**options, "HAS_INVERSES": True, "BV": VALUES, **GLUON_SCANS[name]}
    constants["STAGES"] = num_stages(bool(constants["HAS_CHANNELS"]))
    del constants["BK"]
    built = compile_gluon(scan_blocks, constants, gluon_kinds(scan_blocks, values), aligned=("stride_slot",))
    check_waits(built, partitions=True)
    assert "wgmma.mma_async" in built.ptx and "cp.async.bulk.tensor" in built.ptx
    assert built.stack_bytes == 0 and not built.serialised, built.remarks
    assert built.shared_bytes <= SHARED_BYTES


@pytest.mark.parametrize("values", ["bf16", thorough("fp16")])
def test_gluon_blocks_of_the_delta_rule(values: str) -> None:
    """Four programs share a processor, for 16 bytes of a thread's that are kept outside its registers."""
    from kernels.gated_delta_scan.hopper.kernel import solve_blocks
    from kernels.gated_delta_scan.hopper.launch import REGISTERS

    constants = {name: QWEN[name] for name in ("HEADS", "GROUP", "DK")}
    built = compile_gluon(solve_blocks, constants, gluon_kinds(solve_blocks, values), aligned=(), maxnreg=REGISTERS)
    check_waits(built)
    assert "wgmma.mma_async" in built.ptx and not built.serialised, built.remarks
    assert built.stack_bytes <= 32 and built.shared_bytes <= SHARED_BYTES // 4


@pytest.mark.parametrize("values", ["bf16", thorough("fp16")])
def test_gluon_blocks_by_channel(values: str) -> None:
    """Two programs share a processor."""
    from kernels.gated_delta_scan.hopper.channels import solve_channels

    heads = {name: value for name, value in KIMI.items() if name != "BK"}
    built = compile_gluon(solve_channels, heads, gluon_kinds(solve_channels, values), aligned=("stride_",))
    check_waits(built)
    assert "wgmma.mma_async" in built.ptx and "cp.async.bulk.tensor" in built.ptx
    assert built.stack_bytes == 0 and not built.serialised, built.remarks
    assert built.shared_bytes <= SHARED_BYTES // 2


@pytest.mark.parametrize("values", ["bf16", thorough("fp16")])
def test_gluon_few_blocks_by_channel(values: str) -> None:
    """As above; a block of at most 16 tokens has one product for the sums of all its levels, in no loop."""
    from kernels.gated_delta_scan.hopper.few_channels import solve_few_channels
    from kernels.gated_delta_scan.hopper.launch import FEW_AT_ONCE

    heads = {name: value for name, value in KIMI.items() if name != "BK"}
    constants = {**heads, "AT_ONCE": FEW_AT_ONCE * 132}
    built = compile_gluon(solve_few_channels, constants, gluon_kinds(solve_few_channels, values), aligned=("stride_",))
    check_waits(built)
    assert "cp.async.bulk.tensor" in built.ptx
    # The last thing done: nothing else is given the barrier's place.
    assert built.ptx.rindex("mbarrier.inval") > built.ptx.rindex("shared.b16")
    # Two exact sums of two products each, and one for levels at once and one for a level, of 4 steps each.
    assert built.ptx.count("wgmma.mma_async.sync.aligned.m64n128k16") == (2 * 2 + 2) * 4
    assert built.stack_bytes == 0 and not built.serialised, built.remarks
    assert built.shared_bytes <= SHARED_BYTES // FEW_AT_ONCE
