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


def compiled(phase: int, heads: int, group: int = 32, warps: int = 4) -> Assembled:
    from kernels.sparse_latent_attention.hopper import PIECE
    from kernels.sparse_latent_attention.hopper.few import attend_in_phases

    def kind(name: str) -> str:
        return "*i32" if name.startswith(INTEGERS) else "*bf16" if name.startswith(SIXTEEN_BITS) else "*fp32"

    constants = {
        "PHASE": phase, "PIECE": PIECE, "K": 2048, "HEADS": heads, "PAGE": 64, "GROUP": group, "ARRIVALS": 32,
    }  # fmt: skip
    kinds = {name: kind(name) for name in attend_in_phases.arg_names if name.endswith("_ptr")}
    built = compile_gluon(attend_in_phases, constants, {**kinds, "scale_log2": "fp32"}, num_warps=warps)
    assert not built.spills and not built.serialised and built.shared_bytes <= SHARED_BYTES
    return built


@pytest.mark.parametrize("heads", [128, thorough(16)])
def test_scores(heads: int) -> None:
    """The launches behind it read rows before they wait: they come when all earlier ones have ended."""
    built = compiled(0, heads)
    begin, _, rest = built.ptx.partition("griddepcontrol.launch_dependents")
    assert "griddepcontrol.wait" in begin and "ld.global" not in begin and "cp.async" not in begin
    assert "wgmma.mma_async" in rest


@pytest.mark.parametrize("heads", [128, thorough(16)])
def test_weights(heads: int) -> None:
    before, _, behind = compiled(1, heads).ptx.partition("griddepcontrol.wait")
    assert "st.global" not in before and "st.global" in behind


@pytest.mark.parametrize(("heads", "group"), [(128, 32), (128, 64), (16, 16), thorough(1, 8)])
def test_values(heads: int, group: int) -> None:
    """Latents are on their way before the launches before have ended, weights are not; these come in four batches, of
    many heads two at a time."""
    before, _, behind = compiled(2, heads, group).ptx.partition("griddepcontrol.wait")
    assert "cp.async.cg" in before and "commit_group" not in before and "st.global" not in before
    waits = [int(left) for left in re.findall(r"cp\.async\.wait_group\s+(\d)", behind)]
    assert waits == ([3, 2, 1, 0] if group <= 32 else [1, 1, 1, 0]) and "wgmma.mma_async" in behind


def test_the_fold_of_pieces() -> None:
    """Behind the kernel for many rows; it waits before it reads."""
    before, _, behind = compiled(3, 128, 1, 1).ptx.partition("griddepcontrol.wait")
    assert "ld.global" not in before and "st.global" in behind
