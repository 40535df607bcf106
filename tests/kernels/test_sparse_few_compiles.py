"""The launches of sparse_latent_attention for few rows, compiled for Hopper without a GPU."""

from __future__ import annotations

import re

import pytest

from tests.examples import thorough
from tests.kernels.conftest import INTERPRETING
from tests.kernels.gluon_compile import Assembled, compile_gluon
from tests.kernels.test_compiles import own_cache

pytest.importorskip("triton")

pytestmark = pytest.mark.skipif(INTERPRETING, reason="the interpreter compiles nothing")

__all__ = ["own_cache"]

SHARED_BYTES = 227 << 10
INTEGERS = ("tables", "sequences", "num_keys", "chosen", "arrivals")
SIXTEEN_BITS = ("q", "pages", "weights", "out")


def compiled(phase: int, heads: int, keys: int, group: int = 32, warps: int = 4) -> Assembled:
    from kernels.sparse_latent_attention.hopper import PIECE
    from kernels.sparse_latent_attention.hopper.few import attend_in_phases

    def kind(name: str) -> str:
        return "*i32" if name.startswith(INTEGERS) else "*bf16" if name.startswith(SIXTEEN_BITS) else "*fp32"

    constants = {
        "PHASE": phase, "PIECE": PIECE, "K": 2048, "HEADS": heads, "PAGE": 64, "KEYS": keys, "GROUP": group,
        "ARRIVALS": 32, "WARPS": warps,
    }  # fmt: skip
    kinds = {name: kind(name) for name in attend_in_phases.arg_names if name.endswith("_ptr")}
    built = compile_gluon(attend_in_phases, constants, {**kinds, "scale_log2": "fp32"}, num_warps=warps)
    assert not built.spills and not built.serialised and built.shared_bytes <= SHARED_BYTES
    return built


@pytest.mark.parametrize(("heads", "keys"), [(128, 64), (16, 32)])
def test_weights(heads: int, keys: int) -> None:
    """The launches behind it read rows before they wait: they come when all earlier ones have ended."""
    built = compiled(0, heads, keys)
    begin, _, rest = built.ptx.partition("griddepcontrol.launch_dependents")
    assert "griddepcontrol.wait" in begin and "ld.global" not in begin and "cp.async" not in begin
    assert "wgmma.mma_async" in rest and "ex2.approx" in rest


@pytest.mark.parametrize(
    ("heads", "keys", "group"), [(128, 64, 32), (128, 64, 64), (16, 32, 8), (64, 32, 16), thorough(1, 32, 8)]
)
def test_values(heads: int, keys: int, group: int) -> None:
    """Latents are on their way before the launches before have ended; all of them are there before the first product,
    and no product waits for the one before."""
    from kernels.sparse_latent_attention.hopper.few_launch import MOST_HEADS_OF_FOUR_WARPS

    warps = 4 if group <= MOST_HEADS_OF_FOUR_WARPS else 8
    before, _, behind = compiled(1, heads, keys, group, warps).ptx.partition("griddepcontrol.wait")
    assert "cp.async.cg" in before and "st.global" not in before and "wgmma.mma_async" in behind
    assert re.findall(r"cp\.async\.wait_group\s+(\d)", behind) == ["0"]
    assert "wgmma.wait_group.sync.aligned \t1" in behind or re.search(r"wgmma\.wait_group\S*\s+1;", behind)


def test_the_fold_of_pieces() -> None:
    """Behind the kernel for many rows; it waits before it reads."""
    before, _, behind = compiled(2, 128, 64, 1, 1).ptx.partition("griddepcontrol.wait")
    assert "ld.global" not in before and "st.global" in behind
