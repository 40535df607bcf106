"""A kernel whose sums lie over the barrier that it waited for, and the same one that keeps the barrier's place."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.conftest import INTERPRETING

pytest.importorskip("triton")

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from kernels.hopper.barriers import make_barriers
from tests.kernels.gluon_compile import compile_gluon, descriptor

pytestmark = pytest.mark.skipif(INTERPRETING, reason="the interpreter compiles nothing")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


@gluon.jit  # type: ignore[untyped-decorator]
def sum_columns(rows_desc, out_ptr, keeps: gl.constexpr):  # type: ignore[no-untyped-def]
    """Sums of the columns of a box, then its rows: parts of four warps meet in shared memory beside these."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    full = make_barriers(1, 1)
    rows = gl.allocate_shared_memory(rows_desc.dtype, [64, 64], rows_desc.layout)
    mbarrier.expect(full.index(0), rows_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(rows_desc, [0, 0], full.index(0), rows)
    mbarrier.wait(full.index(0), 0)
    column = gl.arange(0, 64, gl.SliceLayout(0, layout))
    gl.store(out_ptr + column, gl.sum(rows.load(layout).to(gl.float32), 0))
    row = 1 + gl.arange(0, 64, gl.SliceLayout(1, layout))
    gl.store(out_ptr + row[:, None] * 64 + column[None, :], rows.load(layout).to(gl.float32))
    if keeps:
        mbarrier.invalidate(full.index(0))


def compiled(keeps: bool) -> None:
    kinds = {"rows_desc": descriptor("bf16", [64, 64]), "out_ptr": "*fp32"}
    compile_gluon(sum_columns, {"keeps": keeps}, kinds)


def test_a_sum_over_a_barrier_is_named() -> None:
    with pytest.raises(AssertionError, match=r"values lie over a barrier.*tensor<64x64xf32.*tensor<64xf32"):
        compiled(keeps=False)


def test_a_barrier_that_is_used_to_the_end_keeps_its_place() -> None:
    compiled(keeps=True)
