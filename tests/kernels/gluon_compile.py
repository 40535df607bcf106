"""Compiles Gluon kernels for Hopper on a machine without a GPU, and says what the assembler found.

Knows no op.
"""

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import triton

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


def descriptor(dtype: str, box: list[int], element_bits: int = 16) -> str:
    """The type of a host-made tensor descriptor with swizzled boxes, of 128 bytes where a row has as many."""
    from triton.experimental.gluon.language import NVMMASharedLayout

    swizzle = min(box[-1] * element_bits // 8, 128)
    layout = NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=element_bits, rank=len(box))
    return f"tensordesc<{dtype}{box},{layout!r}>"


def compile_gluon(
    function: Any,
    constants: Mapping[str, object],
    kinds: Mapping[str, str],
    folder: Path,
    *,
    num_warps: int = 4,
    aligned: tuple[str, ...] = ("stride_out",),
    **options: object,
) -> Assembled:
    """A jit function whose pointers, and what begins with an `aligned` word, are multiples of 16.

    `kinds` gives types other than i32.
    """
    from triton.backends.compiler import GPUTarget
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
    compiled = triton.compile(source, target=GPUTarget("cuda", HOPPER, 32), options={"num_warps": num_warps, **options})
    ptx = str(compiled.asm["ptx"])
    return Assembled(ptx, _assemble(ptx, folder), compiled.metadata.shared)


def _assemble(ptx: str, folder: Path) -> str:
    path = folder / "kernel.ptx"
    path.write_text(ptx)
    assembler = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    command = [str(assembler), "-v", "--gpu-name=sm_90a", str(path), "-o", os.devnull]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    return run.stderr + run.stdout
