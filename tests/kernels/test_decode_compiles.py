"""decode_attention's Gluon kernel compiles for Hopper on a machine without a GPU: it spills nothing and fits.

A spill is a register's value in memory; wgmma that the assembler serialises waits after each product.
"""

from pathlib import Path

import pytest

from tests.examples import thorough, usual
from tests.kernels.conftest import INTERPRETING
from tests.kernels.gluon_compile import Assembled, compile_gluon, descriptor

triton = pytest.importorskip("triton")

pytestmark = pytest.mark.skipif(INTERPRETING, reason="the interpreter compiles nothing")

FLOAT_POINTERS = ("lse", "sinks", "k_scale", "v_scale", "acc", "row_max", "row_sum")
SHARED_BYTES = 227 << 10
OPTIONS = {"WINDOW": 1000, "SOFTCAP": True, "HAS_SINKS": True, "WANTS_LSE": True}


class Case(dict[str, object]):
    """Compile-time constants of a launch; what is not given is the usual case: 8 kv heads, group 4, dim 128."""

    def __init__(self, programs: int = 2, **changed: object) -> None:
        """`programs` of them share a multiprocessor."""
        from kernels.decode_attention.hopper.launch import MAX_REGISTERS, RING_BYTES, num_stages, parked_levels

        given: dict[str, object] = {
            "HEADS": 8, "GQA_GROUP": 4, "TOKENS": 1, "HAS_SPANS": False, "D": 128, "PAGE": 16, "BY_HEAD": False,
            "TILE": 64, "LEAF": 512, "LEAVES_PER_GROUP": 4, "WINDOW": 0, "PLANNED": None, "SOFTCAP": False,
            "HAS_SINKS": False, "HAS_SCALES": False, "WANTS_LSE": False, "PLACED": False,
        }  # fmt: skip
        given |= changed
        # More tokens than one are never launched without spans.
        given["HAS_SPANS"] = bool(given["HAS_SPANS"]) or int(str(given["TOKENS"])) > 1
        if given["PLANNED"] is None:
            # As the launcher's own plan has it: a window's keys, and those of the tokens before the last.
            given["PLANNED"] = int(str(given["WINDOW"])) and int(str(given["WINDOW"])) + int(str(given["TOKENS"])) - 1
        dim, rows = int(str(given["D"])), int(str(given["GQA_GROUP"])) * int(str(given["TOKENS"]))
        columns = max(16, 1 << (rows - 1).bit_length())
        given |= {"ROWS": rows, "COLUMNS": columns, "PARKED": parked_levels(columns, dim)}
        given["STAGES"] = num_stages(RING_BYTES[programs], columns, dim, 1 if given["HAS_SCALES"] else 2)
        super().__init__(given)
        self.registers = MAX_REGISTERS[programs]


def compile_for_hopper(case: Case) -> Assembled:
    """The kernel, as its launcher would have it compiled."""
    from kernels.decode_attention.hopper.kernel import decode_pages

    box = [min(int(str(case["PAGE"])), 64), int(str(case["D"]))]
    desc = descriptor("fp8e4nv", box, 8) if case["HAS_SCALES"] else descriptor("bf16", box)
    kinds = {name: "*i32" for name in decode_pages.arg_names if name.endswith("_ptr")}
    kinds |= {f"{name}_ptr": "*fp32" for name in FLOAT_POINTERS}
    kinds |= {"k_desc": desc, "v_desc": desc, "q_ptr": "*bf16", "out_ptr": "*bf16", "scale": "fp32", "cap": "fp32"}
    aligned = ("stride_q", "stride_out")
    return compile_gluon(decode_pages, case, kinds, aligned=aligned, maxnreg=case.registers)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


CASES = {
    "plain": Case(),
    "options": Case(**OPTIONS),
    "options, a plan of all keys": Case(PLANNED=0, **OPTIONS),
    "fp8": Case(HAS_SCALES=True),
    "spans": Case(HAS_SPANS=True),
    "places": Case(PLACED=True),
    "places, spans, options": Case(PLACED=True, HAS_SPANS=True, **OPTIONS),
    "places, fp8": Case(PLACED=True, HAS_SCALES=True),
    "spans, options": Case(HAS_SPANS=True, **OPTIONS),
    "spans, fp8, options": Case(HAS_SPANS=True, HAS_SCALES=True, **OPTIONS),
    "dim 256, spans": Case(programs=1, HAS_SPANS=True, D=256),
    "dim 64, 16 heads": Case(D=64, PAGE=256, BY_HEAD=True, GQA_GROUP=16),
    "few sequences": Case(programs=1),
    "4 tokens": Case(TOKENS=4),
    "4 tokens, options": Case(TOKENS=4, **OPTIONS),
    "8 tokens": Case(programs=1, TOKENS=8),
    "8 tokens, options": Case(programs=1, TOKENS=8, **OPTIONS),
    "8 tokens, fp8": Case(programs=1, TOKENS=8, HAS_SCALES=True),
    "8 tokens, fp8, options": Case(programs=1, TOKENS=8, HAS_SCALES=True, **OPTIONS),
    "dim 64, fp8": Case(D=64, HAS_SCALES=True),
    "dim 256": Case(programs=1, D=256),
    "dim 256, fp8": Case(programs=1, D=256, HAS_SCALES=True),
    "dim 256, 8 tokens, fp8": Case(programs=1, D=256, TOKENS=8, HAS_SCALES=True, **OPTIONS),
    "dim 256, 4 tokens of 8 heads": Case(programs=1, TOKENS=4, GQA_GROUP=8, D=256),
    "dim 256, 5 tokens of 3 heads": Case(programs=1, TOKENS=5, GQA_GROUP=3, D=256),
    "dim 256, 8 tokens of 3 heads, options": Case(programs=1, TOKENS=8, GQA_GROUP=3, D=256, **OPTIONS),
    "3 tokens of 7 heads, options": Case(programs=1, TOKENS=3, GQA_GROUP=7, **OPTIONS),
    "5 tokens of 3 heads, fp8, options": Case(TOKENS=5, GQA_GROUP=3, HAS_SCALES=True, **OPTIONS),
    "dim 256, 5 tokens of 3 heads, fp8, options": Case(
        programs=1, TOKENS=5, GQA_GROUP=3, D=256, HAS_SCALES=True, **OPTIONS
    ),
}


# Published models' heads, and one case of each form: many tokens with fp8, pages by head, an odd group.
USUAL = (
    "plain", "places", "options", "dim 64, 16 heads", "8 tokens, fp8, options",
    "dim 256, 5 tokens of 3 heads, fp8, options",
)  # fmt: skip


@pytest.mark.parametrize("name", usual(CASES, *USUAL))
def test_it_spills_nothing_and_fits(name: str) -> None:
    """128 registers let two programs share a multiprocessor; wider cases have one for themselves."""
    case = CASES[name]
    built = compile_for_hopper(case)
    columns = case["COLUMNS"]
    operands = "f16.f16" if case["HAS_SCALES"] else "bf16.bf16"
    assert f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{operands}" in built.ptx
    assert "cp.async.bulk.tensor" in built.ptx
    assert built.stack_bytes == 0 and not built.spills and not built.serialised, built.remarks
    assert built.shared_bytes <= (SHARED_BYTES if case.registers > 128 else SHARED_BYTES // 2)


@pytest.mark.parametrize(
    ("sequences", "planned"),
    [(256, 0), thorough(1024, 1000), thorough(16, 0), thorough(16, 1000), thorough(64, 0), thorough(1024, 0)],
)
@pytest.mark.parametrize("at_once", [False, True])
def test_the_plan_spills_nothing(sequences: int, planned: int, at_once: bool) -> None:
    if at_once and sequences > 256:
        pytest.skip("programs do not claim places where pairs are more than programs")
    from kernels.decode_attention.splits_triton import plan_splits, sizes_of_program
    from tests.kernels.test_compiles import compile_for_hopper as compile_plain

    tree = {"TILE": 64, "PER_LEAF": 8, "LEAVES_PER_GROUP": 4, "SPLIT_FIELDS": 8}
    tree |= {"TAIL_ROUNDS": 7, "TAIL_SHARE": 8, "TAIL_SPLITS": 4, "TAIL_LEAVES": 16, "AT_ONCE": at_once}
    splits, num_warps = sizes_of_program(sequences, at_once)
    blocks = {"BLOCK_SEQS": sequences, "BLOCK_SPLITS": splits}
    constants: dict[str, object] = {"HEADS": 8, "PLANNED": planned, **tree, **blocks}
    built = compile_plain(plan_splits, constants, num_warps, lambda name: "*i32")
    assert built.stack_bytes == 0 and not built.spills
