"""The kernels of sampling, compiled for Hopper: logits in 16-byte words, no spill, quotients rounded as torch does."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kernels.conftest import INTERPRETING
from tests.kernels.gluon_compile import Assembled
from tests.kernels.test_compiles import compile_for_hopper, own_cache

pytest.importorskip("triton")

pytestmark = pytest.mark.skipif(INTERPRETING, reason="the interpreter compiles nothing")

__all__ = ["own_cache"]

FP32 = ("temperature", "top_p", "top_values", "min_p", "repetition", "presence", "frequency", "maxima", "best_ptr")
BLOCKS = {"BLOCK_TILES": 32, "BLOCK_CHUNKS": 2048}


def kind(name: str) -> str:
    if name.startswith("logits"):
        return "*bf16"
    if name.startswith("key_"):
        return "*i64"
    return "*fp32" if name.startswith((*FP32, "tile_", "out")) else "*i32"


def built(function: Any, constants: dict[str, Any], num_warps: int, **options: object) -> Assembled:
    """For a vocabulary that is a multiple of 16, as those of real models are."""
    return compile_for_hopper(function, constants, num_warps, kind, aligned=("V",), **options)


@pytest.mark.parametrize("counts", [False, True])
def test_sampling(counts: bool) -> None:
    from kernels.sample_tokens.triton import CHOOSE_WARPS, CHUNK, SCORE_WARPS, TILE_CHUNKS, choose_tokens, score_tiles

    sizes = {"TILE_CHUNKS": TILE_CHUNKS, "CHUNK": CHUNK, "COUNTS": counts}
    for function, blocks, warps in ((score_tiles, {}, SCORE_WARPS), (choose_tokens, BLOCKS, CHOOSE_WARPS)):
        made = built(function, {**sizes, **blocks}, warps, enable_fp_fusion=False)
        assert not made.spills
        assert "ld.global.v4" in made.ptx
        assert "div.rn.f32" in made.ptx


def test_logprobs() -> None:
    from kernels.top_logprobs.triton import CHUNK, RANK_WARPS, SCAN_WARPS, TILE_CHUNKS, rank_tokens, scan_tiles

    scan = built(scan_tiles, {"TILE": TILE_CHUNKS, "CHUNK": CHUNK}, SCAN_WARPS)
    assert "ld.global.v4" in scan.ptx
    assert not scan.spills
    assert not built(rank_tokens, {**BLOCKS, "CHUNK": CHUNK}, RANK_WARPS).spills
