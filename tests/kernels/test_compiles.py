"""Kernels compile for Hopper on a machine without a GPU, use its instructions and spill no register."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.conftest import INTERPRETING
from tests.kernels.gluon_compile import Assembled, compiled_source

triton = pytest.importorskip("triton")

pytestmark = pytest.mark.skipif(INTERPRETING, reason="the interpreter compiles nothing")

FLOATS = dict.fromkeys(
    ("scale_log2", "scale", "eps", "limit", "alpha", "cap", "least", "cut_tiles", "merge_tiles"), "fp32"
)
SHARED = {
    "HEADS": 8,
    "GQA_GROUP": 4,
    "D": 128,
    "PAGE": 16,
    "X": 8,
    "LAYOUT": 0,
    "WINDOW": 0,
    "BLOCK_N": 64,
    "BLOCK_D": 128,
}


def pointer(name: str) -> str:
    if name.startswith(("tables", "cu_", "seqlens")):
        return "*i32"
    if "scales" in name:
        return "*fp32"
    return "*fp32" if name.startswith(("lse", "acc", "row_max", "row_sum", "total", "sinks")) else "*bf16"


def fp8_pointer(name: str) -> str:
    return "*i64" if name.startswith("slots") else "*fp8e4nv" if "pages" in name else pointer(name)


def compile_for_hopper(
    function: Any,
    constants: dict[str, object],
    num_warps: int,
    pointer: Callable[[str], str] = pointer,
    aligned: tuple[str, ...] = (),
    unaligned: tuple[str, ...] = (),
    **options: object,
) -> Assembled:
    """A jit function whose pointers, strides and widths, and what `aligned` names, are multiples of 16; `unaligned` are
    not."""
    from triton.compiler import ASTSource

    names = function.arg_names
    kinds = {name: pointer(name) if name.endswith("_ptr") else FLOATS.get(name, "i32") for name in names}
    signature = {name: "constexpr" if name in constants else kinds[name] for name in names}
    is_aligned = [n.endswith("_ptr") or n.startswith(("stride_", "words")) or n in aligned for n in names]
    is_aligned = [holds and name not in unaligned for holds, name in zip(is_aligned, names, strict=True)]
    source = ASTSource(
        function,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(i,): [["tt.divisibility", 16]] for i, holds in enumerate(is_aligned) if holds},
    )
    return compiled_source(source, num_warps=num_warps, **options)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


DECODES: dict[str, dict[str, object]] = {
    "plain": {},
    "dim 256": {"D": 256, "BLOCK_D": 256},
    "dim 256, fp8, every option": {
        "D": 256, "BLOCK_D": 256, "X": 16, "TOKENS": 8, "HAS_SPANS": True, "WINDOW": 300, "SOFTCAP": True, "SCALES": 2,
    },
    "dim 192, fp8, SHUFFLE": {"D": 192, "BLOCK_D": 256, "X": 16, "LAYOUT": 2, "SCALES": 1},
}  # fmt: skip


def fp8_pages(name: str) -> str:
    return "*fp8e4nv" if "pages" in name else pointer(name)


@pytest.mark.parametrize("name", DECODES)
def test_decode_uses_tensor_cores_and_spills_nothing(name: str) -> None:
    from kernels.decode_attention.triton import attend_split, key_block

    constants = {"SPLIT": 256, "ROWS": 16, "TOKENS": 1, "HAS_SPANS": False, "SOFTCAP": False, "SCALES": 0}
    constants = {**SHARED, **constants, **DECODES[name]}
    constants["BLOCK_N"] = key_block(int(str(constants["D"])))
    built = compile_for_hopper(attend_split, constants, 4, fp8_pages if constants["SCALES"] else pointer)
    assert "mma.sync" in built.ptx and "cp.async" in built.ptx
    assert not built.spills


@pytest.mark.parametrize("per_token", [False, True])
def test_codes_are_rounded_once_and_saturate(per_token: bool) -> None:
    """fp32 to e4m3 in one instruction: a detour over fp16 would round twice."""
    from kernels.append_kv.triton import append_quantized
    from kernels.gather_pages.triton import convert_tokens

    constants = {"HEADS": 8, "D": 192, "PAGE": 16, "X": 16, "LAYOUT": 2, "TOKENS": 4, "BLOCK_D": 256}
    constants |= {"PER_TOKEN": per_token}
    search = {"LEVELS": 1}
    append = compile_for_hopper(append_quantized, constants, 4, fp8_pointer)
    scatter = compile_for_hopper(convert_tokens, {**constants, **search, "GATHER": False}, 4, fp8_pointer)
    for built in (append, scatter):
        assert "cvt.rn.satfinite.e4m3x2.f32" in built.ptx and "div.rn.f32" in built.ptx and "div.full" not in built.ptx
        assert not built.spills
    gather = compile_for_hopper(convert_tokens, {**constants, **search, "GATHER": True}, 4, fp8_pointer)
    assert "cvt.rn.f16x2.e4m3x2" in gather.ptx  # every e4m3 number is one of fp16
