"""Kernels that move and touch up rows, compiled for Hopper: 16-byte words, no spill, no detour over shared memory."""

import re
from typing import Any

import pytest

from tests.kernels.conftest import INTERPRETING
from tests.kernels.gluon_compile import Assembled, check_waits
from tests.kernels.test_compiles import compile_for_hopper, own_cache, pointer

pytest.importorskip("triton")

pytestmark = pytest.mark.skipif(INTERPRETING, reason="the interpreter compiles nothing")

__all__ = ["own_cache"]

HEADS = {"Q_HEADS": 32, "HEADS": 8, "D": 128, "HALF": 64, "PAGE": 16, "X": 8, "LAYOUT": 0}
BLOCKS = {"TOKENS": 2, "BLOCK_H": 8, "BLOCK_HALF": 64, "BLOCK_REST": 1}


def kind(name: str) -> str:
    if name.startswith(("slots", "positions", "ids")):
        return "*i64"
    if name.startswith("cos_sin") or "scales" in name:
        return "*fp32"
    return "*i32" if name.startswith("first_positions") else pointer(name)


def fp8_kind(name: str) -> str:
    return "*fp8e4nv" if "_pages" in name else kind(name)


def word_kind(name: str) -> str:
    return "*i64" if name.startswith(("planes", "packed")) else kind(name)


def check_moves(built: Assembled, turns_over: bool = False) -> None:
    """All rows in 16-byte words, straight from register to memory, but for what a search turns over between lanes."""
    assert not built.spills
    assert "ld.global.v4" in built.ptx or "ld.global.v2.b64" in built.ptx
    assert not re.search(r"st\.global\.b", built.ptx)
    assert turns_over or "st.shared" not in built.ptx


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("layout", [0, 1])
def test_rotate_append(layout: int, normed: bool) -> None:
    """Products and sums apart, as torch rounds them."""
    from kernels.rotate_append_kv.triton import rotate_rows

    constants: dict[str, Any] = {**HEADS, **BLOCKS, "LAYOUT": layout, "NORM": normed, "SCALES": 0, "OVERLAPS": True}
    built = compile_for_hopper(rotate_rows, constants, 4, kind, enable_fp_fusion=False)
    check_moves(built)
    assert normed or "fma.rn.f32" not in built.ptx


@pytest.mark.parametrize("scales", [1, 2])
def test_rotate_append_codes(scales: int) -> None:
    from kernels.rotate_append_kv.triton import rotate_rows

    constants = {**HEADS, **BLOCKS, "NORM": False, "SCALES": scales, "OVERLAPS": True}
    built = compile_for_hopper(rotate_rows, constants, 4, fp8_kind)
    assert "cvt.rn.satfinite.e4m3x2.f32" in built.ptx and "div.rn.f32" in built.ptx and "div.full" not in built.ptx
    assert not built.spills


def test_rotate_append_latent() -> None:
    """Of DeepSeek-V3 and of GLM-4.7-Flash."""
    from kernels.rotate_append_latent.triton import rotate_latents

    for heads, nope in ((128, 128), (20, 192)):
        row = {"HEADS": heads, "NOPE": nope, "LATENT": 512, "HALF": 32, "PAGE": 64, "TURNS": True}
        row["OVERLAPS"] = True
        blocks = {"BLOCK_H": 16, "BLOCK_LATENT": 512, "BLOCK_HALF": 32}
        built = compile_for_hopper(rotate_latents, row | blocks, 1, kind, enable_fp_fusion=False)
        assert not built.spills and built.shared_bytes == 0
        check_waits(built)
        # Both halves of 16 heads and the latent in words of 16 bytes; one rotary key is 2 elements for each lane.
        assert built.ptx.count("st.global.v4") == 6 and built.ptx.count("st.global.b16") == 2
        built = compile_for_hopper(rotate_latents, row | blocks | {"TURNS": False}, 1, kind, enable_fp_fusion=False)
        check_waits(built)
        assert not built.spills and built.ptx.count("st.global.v4") == 2 and built.ptx.count("st.global.b16") == 2


@pytest.mark.parametrize("has_new", [False, True])
def test_latents(has_new: bool) -> None:
    from kernels.gather_latent.triton import gather_rows

    gather = {"WIDTH": 576, "PAGE": 64, "MAIN": 512, "BLOCK_REST": 64, "ROWS": 4, "LEVELS": 1}
    flags = {"HAS_NEW": has_new, "HAS_FIRST": not has_new, "OVERLAPS": True}
    built = compile_for_hopper(gather_rows, {**gather, **flags}, 1, kind)
    check_waits(built)
    check_moves(built, turns_over=True)


def test_rows() -> None:
    from kernels.gated_activation.gate import GateKind
    from kernels.gated_activation.triton import gate_rows
    from kernels.rms_norm.triton import normalise_rows
    from kernels.softcap_logits.triton import cap_rows

    for gate in GateKind:
        constants = {
            "D": 14336,
            "COLUMNS": 1024,
            "KIND": gate.value,
            "CLAMPS": gate is not GateKind.GELU_TANH,
            "OVERLAPS": True,
        }
        check_moves(compile_for_hopper(gate_rows, constants, 4, kind))
    check_moves(compile_for_hopper(cap_rows, {"COLUMNS": 2048}, 4, kind, aligned=("V",)))
    for adds in (False, True):
        constants = {"D": 4096, "BLOCK_D": 4096, "ADDS": adds, "OVERLAPS": True}
        for weight in ("*bf16", "*fp32"):
            built = compile_for_hopper(
                normalise_rows, constants, 8, lambda name, weight=weight: weight if name == "weight_ptr" else kind(name)
            )
            assert not built.spills
            assert "ld.global.v4" in built.ptx and "st.global.v4" in built.ptx


def test_gates() -> None:
    from kernels.gates.triton import COLUMNS, PART, gate_channels, gate_delta, multiply_by_sigmoid, norm_and_gate

    def gate_kind(name: str) -> str | None:
        return "*fp32" if name in ("bias_ptr", "a_ptr", "g_ptr", "betas_ptr") else kind(name)

    for one in (False, True):
        constants = {"D": 4096, "COLUMNS": 1024, "ONE": one, "OVERLAPS": True}
        built = compile_for_hopper(multiply_by_sigmoid, constants, 4, kind)
        check_moves(built)
        check_waits(built, 0)
    for part in (1, PART):
        heads = {"HEADS": 32, "D": 128, "SILU": True, "PART": part, "BLOCK_D": 128, "OVERLAPS": True}
        built = compile_for_hopper(norm_and_gate, heads, 1, kind)
        check_waits(built, 1)
        # A head has 4 elements for each lane of its warp, however many heads a program has: its sum has one order.
        assert built.ptx.count("shfl.sync.bfly") == 5 * part and built.ptx.count("ld.global.v2.b32") == 1 + 2 * part
        assert not built.spills and built.shared_bytes == 0 and built.ptx.count("st.global.v2.b32") == part
    built = compile_for_hopper(gate_delta, {"HEADS": 32, "BLOCK_H": 32, "OVERLAPS": True}, 1, gate_kind)
    check_waits(built, 2)
    assert not built.spills and built.shared_bytes == 0
    channels = {"HEADS": 32, "KEYS": 128, "COLUMNS": COLUMNS, "BLOCK_H": 32, "OVERLAPS": True}
    built = compile_for_hopper(gate_channels, channels, 4, gate_kind)
    check_waits(built, 10)
    assert not built.spills and "st.global.v4" in built.ptx


@pytest.mark.parametrize("pack", [False, True])
def test_whole_pages(pack: bool) -> None:
    from kernels.copy_pages.triton import move_words, move_words_in_turn

    for function, warps in ((move_words, 2), (move_words_in_turn, 4)):
        check_moves(compile_for_hopper(function, {"PACK": pack, "WORDS": 512}, warps, word_kind))
