"""decode_attention's Gluon kernel compiles for Hopper on a machine without a GPU: what it uses and what it spills.

Knows no result. A spill is a register's value in memory; wgmma that the assembler serialises waits after each product.
"""

import re
from pathlib import Path

import pytest

from tests.kernels.conftest import INTERPRETING
from tests.kernels.test_compiles import HOPPER, assemble

triton = pytest.importorskip("triton")

pytestmark = pytest.mark.skipif(INTERPRETING, reason="the interpreter compiles nothing")

FLOAT_POINTERS = ("lse", "sinks", "k_scale", "v_scale", "acc", "peak", "total")


class Case(dict[str, object]):
    """Compile-time constants of a launch; what is not given is the usual case: 8 kv heads, group 4, dim 128."""

    def __init__(self, **changed: object) -> None:
        given: dict[str, object] = {
            "HEADS": 8, "GROUP": 4, "TOKENS": 1, "COLUMNS": 16, "ROWS": 4, "D": 128, "PAGE": 16, "BY_HEAD": False,
            "TILE": 64, "LEAF": 512, "LEAVES": 4, "STAGES": 2, "WINDOW": 0, "SOFTCAP": False, "HAS_SINKS": False,
            "HAS_SCALES": False, "WANTS_LSE": False,
        }  # fmt: skip
        super().__init__(given | changed)


def compile_for_hopper(case: Case, maxnreg: int) -> str:
    """PTX of the kernel, as its launcher would have it compiled."""
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from kernels.decode_attention.hopper.kernel import decode_pages

    codes = case["HAS_SCALES"]
    box = [min(int(str(case["PAGE"])), 64), int(str(case["D"]))]
    layout = gl.NVMMASharedLayout.get_default_for(box, gl.float8e4nv if codes else gl.bfloat16)
    desc = f"tensordesc<{'fp8e4nv' if codes else 'bf16'}{box},{layout!r}>"
    names = decode_pages.arg_names
    kinds = {name: "*i32" if name.endswith("_ptr") else "i32" for name in names}
    kinds |= {f"{name}_ptr": "*fp32" for name in FLOAT_POINTERS}
    kinds |= {"k_desc": desc, "v_desc": desc, "q_ptr": "*bf16", "out_ptr": "*bf16", "scale": "fp32", "cap": "fp32"}
    signature = {name: "constexpr" if name in case else kinds[name] for name in names}
    aligned = [i for i, name in enumerate(names) if name.endswith("_ptr") or name.startswith("stride_")]
    source = GluonASTSource(
        decode_pages,
        signature,
        {(names.index(name),): value for name, value in case.items()},
        {(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    options = {"num_warps": 4, "maxnreg": maxnreg}
    compiled = triton.compile(source, target=GPUTarget("cuda", HOPPER, 32), options=options)
    return str(compiled.asm["ptx"])


def spilled_bytes(report: str) -> int:
    found = re.search(r"(\d+) bytes spill stores", report)
    assert found is not None, report
    return int(found[1])


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(WINDOW=1000, SOFTCAP=True, HAS_SINKS=True, WANTS_LSE=True),
        Case(HAS_SCALES=True, STAGES=4),
        Case(D=64, PAGE=256, BY_HEAD=True, STAGES=4, GROUP=16, ROWS=16),
    ],
    ids=["plain", "options", "fp8", "other sizes"],
)
def test_one_token_fits_registers(case: Case, tmp_path: Path) -> None:
    """At 128 registers, so that two programs share a multiprocessor; a few bytes wait outside of the tiles' loop."""
    ptx = compile_for_hopper(case, maxnreg=128)
    assert "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16" in ptx and "cp.async.bulk.tensor" in ptx
    report = assemble(ptx, tmp_path)
    assert spilled_bytes(report) <= 128
    assert "serializ" not in report


@pytest.mark.parametrize(
    ("case", "most"),
    [
        (Case(TOKENS=8, COLUMNS=32, ROWS=32, STAGES=4), 512),
        (Case(TOKENS=4, GROUP=8, D=256, COLUMNS=32, ROWS=32), 2048),
        (Case(D=256), 512),
    ],
    ids=["8 tokens of 4 heads", "4 tokens of 8 heads, dim 256", "dim 256"],
)
def test_what_larger_cases_spill_is_known(case: Case, most: int, tmp_path: Path) -> None:
    """These have a multiprocessor for themselves."""
    report = assemble(compile_for_hopper(case, maxnreg=248), tmp_path)
    assert spilled_bytes(report) <= most
    assert "serializ" not in report
