"""A kernel is compiled anew when anything of it changed, and only then."""

import importlib.util
import os
from pathlib import Path

import pytest

from tests.kernels import assembled_cache
from tests.kernels.conftest import INTERPRETING

triton = pytest.importorskip("triton")

pytestmark = pytest.mark.skipif(INTERPRETING, reason="the interpreter compiles nothing")

MODULE = """
import triton
import triton.language as tl

SHIFT: tl.constexpr = tl.constexpr(SHIFT_VALUE)

@triton.jit
def callee(number):
    return number + CALLEE_VALUE

@triton.jit
def kernel(out_ptr, N: tl.constexpr):
    tl.store(out_ptr, callee(N) + SHIFT)
"""


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembled_cache, "FOLDER", tmp_path / "assembled")
    monkeypatch.setattr(assembled_cache, "THOROUGH", False)


def key(tmp_path: Path, *, shift: int = 1, callee: int = 2, constant: int = 3, num_warps: int = 4) -> str:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    path = tmp_path / f"made_{shift}_{callee}.py"
    path.write_text(MODULE.replace("SHIFT_VALUE", str(shift)).replace("CALLEE_VALUE", str(callee)))
    spec = importlib.util.spec_from_file_location(f"made_{shift}_{callee}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    source = ASTSource(module.kernel, {"out_ptr": "*i32", "N": "constexpr"}, {(1,): constant}, {})
    return assembled_cache.key_of(source, GPUTarget("cuda", 90, 32), {"num_warps": num_warps})


def test_the_key_is_that_of_the_source_and_of_all_it_uses(tmp_path: Path) -> None:
    assert key(tmp_path) == key(tmp_path)
    changes = [{"shift": 7}, {"callee": 7}, {"constant": 7}, {"num_warps": 8}]
    keys = {key(tmp_path), *(key(tmp_path, **change) for change in changes)}
    assert len(keys) == 5


def test_what_was_kept_comes_back_and_the_oldest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert assembled_cache.recall("a") is None
    assembled_cache.keep("a", ("ptx", "remarks", 7))
    assert assembled_cache.recall("a") == ["ptx", "remarks", 7]
    monkeypatch.setattr(assembled_cache, "MAX_KEPT", 1)
    os.utime(assembled_cache.FOLDER / "a", (0, 0))
    assembled_cache.keep("b", ("", "", 0))
    assert assembled_cache.recall("a") is None and assembled_cache.recall("b") is not None


def test_a_damaged_file_counts_as_absent() -> None:
    assembled_cache.keep("a", ("ptx", "remarks", 7))
    (assembled_cache.FOLDER / "a").write_bytes(b"cut short")
    assert assembled_cache.recall("a") is None


def test_a_thorough_run_recalls_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assembled_cache.keep("a", ("ptx", "remarks", 7))
    monkeypatch.setattr(assembled_cache, "THOROUGH", True)
    assert assembled_cache.recall("a") is None


def test_a_draft_that_goes_while_the_folder_is_read_is_passed_over() -> None:
    """Each process of the tests keeps kernels here. A link to nothing stands for the other one's draft: it is listed,
    and gone when looked at."""
    assembled_cache.keep("a", ("ptx",))
    (assembled_cache.FOLDER / "b.17").symlink_to("nothing")
    assembled_cache.keep("c", ("ptx",))
    assert assembled_cache.recall("a") == assembled_cache.recall("c") == ["ptx"]
