"""The kernels of sparse attention, compiled for Hopper without a GPU: tensor cores where products are, no spill."""

from __future__ import annotations

import re

import pytest

from tests.kernels.conftest import INTERPRETING
from tests.kernels.test_compiles import compile_for_hopper, own_cache

pytest.importorskip("triton")

pytestmark = pytest.mark.skipif(INTERPRETING, reason="the interpreter compiles nothing")

__all__ = ["own_cache"]

SHARED_BYTES = 227 << 10
# Of a thread, where more registers would mean fewer warps or smaller tiles: measured slower on an H200.
SPILLED_BYTES = 512
INTEGERS = ("tables", "sequences", "num_keys", "chosen", "positions")


def pointer(name: str) -> str:
    if name.startswith("slots"):
        return "*i64"
    if name.startswith(INTEGERS):
        return "*i32"
    return "*fp32" if name.startswith(("weights", "scales", "cos_sin")) else "*bf16"


def fp8_pointer(name: str) -> str:
    return "*fp8e4nv" if name.startswith("pages") else pointer(name)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("is_large", [False, True])
def test_index_logits(is_large: bool, heads: int, fp8: bool) -> None:
    from kernels.index_logits.triton import BLOCK_N, SPAN, SPAN_STAGES, STAGES, TILE_ROWS, WARPS, score_keys, score_span

    shared = {
        "HEADS": heads, "DIM": 128, "PAGE": 16, "BLOCK_N": BLOCK_N, "BLOCK_H": heads, "BLOCK_D": 128, "HAS_SCALES": fp8,
    }  # fmt: skip

    def of(name: str) -> str:
        return "*fp32" if name.startswith("out") else (fp8_pointer if fp8 else pointer)(name)

    if is_large:
        built = compile_for_hopper(score_keys, {**shared, "ROWS": TILE_ROWS, "STAGES": STAGES}, WARPS, of)
    else:
        built = compile_for_hopper(score_span, {**shared, "SPAN": SPAN, "STAGES": SPAN_STAGES}, WARPS, of)
    assert "wgmma.mma_async" in built.ptx and "cp.async" in built.ptx and not built.serialised
    assert not built.spills and built.shared_bytes <= SHARED_BYTES


@pytest.mark.parametrize(("is_first", "is_last"), [(True, True), (True, False), (False, False), (False, True)])
def test_top_k(is_first: bool, is_last: bool) -> None:
    from kernels.top_k.triton import CHUNK, narrow, warps_for

    def of(name: str) -> str:
        return "*fp32" if name.startswith("logits") else "*i32"

    constants = {"K": 2048, "CHUNK": CHUNK, "IS_FIRST": is_first, "IS_LAST": is_last}
    for programs in (1, 1000):
        built = compile_for_hopper(narrow, constants, warps_for(programs), of)
        assert built.stack_bytes <= SPILLED_BYTES and not re.search(r"\b(atom|red)\.", built.ptx)


@pytest.mark.parametrize("heads", [8, 16, 64, 128])
@pytest.mark.parametrize("page_tokens", [1, 64])
def test_sparse_latent_attention(heads: int, page_tokens: int) -> None:
    from kernels.sparse_latent_attention.triton import BLOCK_N, MOST_HEADS, STAGES, attend_chosen

    constants = {
        "K": 2048, "HEADS": heads, "PAGE": page_tokens, "ROWS": min(max(heads, 16), MOST_HEADS), "BLOCK_N": BLOCK_N,
        "LATENT": 512, "ROPE": 64, "BLOCK_LATENT": 512, "BLOCK_ROPE": 64, "STAGES": STAGES,
    }  # fmt: skip
    built = compile_for_hopper(attend_chosen, constants, 8, pointer)
    assert "mma" in built.ptx and not built.serialised
    assert built.stack_bytes <= SPILLED_BYTES and built.shared_bytes <= SHARED_BYTES


@pytest.mark.parametrize("fp8", [False, True])
def test_rotate_append_index(fp8: bool) -> None:
    from kernels.rotate_append_index.triton import BLOCK_H, rotate_index

    constants = {
        "HEADS": 64, "DIM": 128, "HALF": 32, "PAGE": 16, "BLOCK_H": BLOCK_H, "BLOCK_DIM": 128, "BLOCK_HALF": 32,
        "BLOCK_REST": 64, "HAS_SCALES": fp8,
    }  # fmt: skip
    built = compile_for_hopper(rotate_index, constants, 1, fp8_pointer if fp8 else pointer, enable_fp_fusion=False)
    assert not built.spills
