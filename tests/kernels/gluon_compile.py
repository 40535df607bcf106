"""Compiles kernels for Hopper on a machine without a GPU, and says what the assembler found."""

import contextlib
import io
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import triton

from tests.examples import THOROUGH
from tests.kernels import assembled_cache
from tests.kernels.barrier_places import values_over_barriers
from tests.kernels.loads_in_flight import BY_LINE, overtaken
from tests.kernels.machine_code import disassembled, overwritten_operands, unwritten_registers

HOPPER = 90


class Assembled(NamedTuple):
    """What became of a kernel: its PTX, the assembler's remarks and the shared memory that it asks for."""

    ptx: str
    remarks: str
    shared_bytes: int

    @property
    def spills(self) -> bool:
        return "0 bytes spill stores, 0 bytes spill loads" not in self.remarks

    @property
    def stack_bytes(self) -> int:
        """What one thread keeps outside its registers."""
        return max(int(size) for size in re.findall(r"(\d+) bytes stack frame", self.remarks))

    @property
    def serialised(self) -> bool:
        """Whether the assembler had to wait after every wgmma."""
        return "serialized" in self.remarks


def check_waits(built: Assembled, constants: int = 0, *, partitions: bool = False) -> None:
    """Every program waits for the launches before it; until then it makes `constants` loads, and writes nothing.

    With partitions the first one waits, and then starts the others, which have branched off at the kernel's begin.
    """
    before, waits, _ = built.ptx.partition("griddepcontrol.wait")
    assert waits and "griddepcontrol.launch_dependents" in before
    assert not re.search(r"st\.global|atom|cp\.async|barrier\.sync|\bret\b", before)
    assert before.count("ld.global") == constants
    assert len(re.findall(r"\bbra\b", before)) == (2 if partitions else 0)


def descriptor(dtype: str, box: list[int], element_bits: int = 16) -> str:
    """The type of a host-made tensor descriptor with swizzled boxes, of 128 bytes where a row has as many."""
    from triton.experimental.gluon.language import NVMMASharedLayout

    swizzle = min(box[-1] * element_bits // 8, 128)
    layout = NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=element_bits, rank=len(box))
    return f"tensordesc<{dtype}{box},{layout!r}>"


def flat_descriptor(dtype: str, box: int, element_bits: int = 32) -> str:
    """The type of a host-made tensor descriptor of one dimension."""
    from triton.experimental.gluon.language import NVMMASharedLayout

    layout = NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=element_bits, rank=1)
    return f"tensordesc<{dtype}[{box}],{layout!r}>"


def compile_gluon(
    function: Any,
    constants: Mapping[str, object],
    kinds: Mapping[str, str],
    *,
    num_warps: int = 4,
    aligned: tuple[str, ...] = ("stride_out",),
    **options: object,
) -> Assembled:
    """A jit function whose pointers, and what begins with an `aligned` word, are multiples of 16.

    `kinds` gives types other than i32.
    """
    from triton.experimental.gluon._runtime import GluonASTSource

    names = function.arg_names
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names}
    multiples = [i for i, name in enumerate(names) if name.endswith("_ptr") or name.startswith(aligned)]
    source = GluonASTSource(
        function,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(i,): [["tt.divisibility", 16]] for i in multiples},
    )
    return compiled_source(source, num_warps=num_warps, **options)


def compiled_source(source: Any, **options: object) -> Assembled:
    """A source as Triton itself compiles it, now or in an earlier run of the tests; the remarks are the assembler's."""
    from triton.backends.compiler import GPUTarget

    target = GPUTarget("cuda", HOPPER, 32)
    key = assembled_cache.key_of(source, target, options)
    kept = assembled_cache.recall(key)
    if kept is not None:
        return Assembled(*kept)
    assembled = _assembled(source, target, options)
    assembled_cache.keep(key, assembled)
    return assembled


def _assembled(source: Any, target: Any, options: dict[str, object]) -> Assembled:
    from triton import knobs

    said = io.StringIO()
    with knobs.nvidia.scope(), contextlib.redirect_stdout(said):
        knobs.nvidia.dump_ptxas_log = True
        compiled = triton.compile(source, target=target, options=options)
    remarks = said.getvalue()
    assert "ptxas info" in remarks, "taken from a cache, or the assembler's log was not printed"
    ptx = str(compiled.asm["ptx"])
    if "mbarrier.init" in ptx and "warp_specialize" not in (ttgir := str(compiled.asm["ttgir"])):
        wrong = values_over_barriers(ttgir)
        assert not wrong, f"values lie over a barrier, see barrier_places: {wrong}"
    has_copies = "cp.async.bulk.tensor" in ptx
    # Only operands' addresses of wgmma were built from such registers so far, and disassembling takes 0.2 s a kernel.
    if has_copies or "wgmma" in ptx or THOROUGH:
        code = disassembled(compiled.asm["cubin"], *(BY_LINE if has_copies else ()))
        assert not (wrong := unwritten_registers(code)), f"machine code reads registers which nobody wrote: {wrong}"
        assert not (wrong := overwritten_operands(code)), (
            f"machine code writes operands that a wgmma still reads: {wrong}"
        )
        if has_copies:
            wrong = overtaken(code, str(compiled.asm["ttgir"]))
            assert not wrong, f"loads that the copy engine may overtake, see release_read: {wrong}"
    return Assembled(ptx, remarks, compiled.metadata.shared)
