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
@pytest.mark.parametrize("rows", [1, 16])
def test_index_logits(rows: int, heads: int, fp8: bool) -> None:
    from kernels.index_logits.triton import BLOCK_N, score_keys

    constants = {
        "HEADS": heads, "DIM": 128, "PAGE": 16, "ROWS": rows, "BLOCK_N": BLOCK_N, "BLOCK_H": heads, "BLOCK_D": 128,
        "HAS_SCALES": fp8,
    }  # fmt: skip

    def of(name: str) -> str:
        return "*fp32" if name.startswith("out") else (fp8_pointer if fp8 else pointer)(name)

    built = compile_for_hopper(score_keys, constants, 8, of)
    assert "wgmma.mma_async" in built.ptx and not built.serialised
    assert not built.spills and built.shared_bytes <= SHARED_BYTES


def test_top_k() -> None:
    from kernels.top_k.triton import LANES, choose

    def of(name: str) -> str:
        return "*fp32" if name.startswith("logits") else "*i32"

    built = compile_for_hopper(choose, {"K": 2048, "LANES": LANES}, 16, of)
    assert not built.spills and not re.search(r"\b(atom|red)\.", built.ptx)


@pytest.mark.parametrize("heads", [8, 16, 64, 128])
@pytest.mark.parametrize("page_tokens", [1, 64])
def test_sparse_latent_attention(heads: int, page_tokens: int) -> None:
    from kernels.sparse_latent_attention.triton import BLOCK_N, MOST_HEADS, attend_chosen

    constants = {
        "K": 2048, "HEADS": heads, "PAGE": page_tokens, "ROWS": min(max(heads, 16), MOST_HEADS), "BLOCK_N": BLOCK_N,
        "LATENT": 512, "ROPE": 64, "BLOCK_LATENT": 512, "BLOCK_ROPE": 64,
    }  # fmt: skip
    built = compile_for_hopper(attend_chosen, constants, 8, pointer)
    assert "mma" in built.ptx and not built.serialised
    assert not built.spills and built.shared_bytes <= SHARED_BYTES


@pytest.mark.parametrize("fp8", [False, True])
def test_rotate_append_index(fp8: bool) -> None:
    from kernels.rotate_append_index.triton import BLOCK_H, rotate_index

    constants = {
        "HEADS": 64, "DIM": 128, "HALF": 32, "PAGE": 16, "BLOCK_H": BLOCK_H, "BLOCK_DIM": 128, "BLOCK_HALF": 32,
        "BLOCK_REST": 64, "HAS_SCALES": fp8,
    }  # fmt: skip
    built = compile_for_hopper(rotate_index, constants, 1, fp8_pointer if fp8 else pointer, enable_fp_fusion=False)
    assert not built.spills
