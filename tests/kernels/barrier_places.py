"""Finds values that the compiler puts over an mbarrier, in the intermediate code of a kernel for Hopper.

Shared memory that is used no more is given to intermediate values: parts of sums between warps, conversions of layouts.
The copy engine arrives at an mbarrier by a path of its own, and on an H200 such a value was now and then another number
(docs/adr/0007-gluon-beside-triton.md). A use at the end of the kernel, `mbarrier.invalidate`, keeps a barrier's place.
Barriers that partitions were given keep theirs as long as these run: such kernels need not be looked at.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from triton._C.libtriton import ir, nvidia, passes

CAPABILITY, PTX_VERSION = 90, 84
_BYTES = {"i64": 8, "f64": 8, "i32": 4, "f32": 4, "i16": 2, "f16": 2, "bf16": 2}
_OFFSET = re.compile(r"allocation\.offset = (\d+)")
_WARPS = re.compile(r'"ttg\.(?:total-)?num-warps" = (\d+)')
_SHAPE = re.compile(r"(?:tensor|memdesc)<((?:\d+x)+)(\w+)")


class Place(NamedTuple):
    """Bytes of shared memory that an operation has."""

    first: int
    end: int
    line: str

    def overlaps(self, other: Place) -> bool:
        return self.first < other.end and other.first < self.end


def values_over_barriers(ttgir: str) -> list[str]:
    """Returns the operations whose values lie over an mbarrier, of a kernel's code as Triton keeps it."""
    barriers: list[Place] = []
    values: list[Place] = []
    code = allocated(ttgir)
    warps = max(map(int, _WARPS.findall(code)), default=4)
    for line in code.splitlines():
        if found := _OFFSET.search(line):
            place = _place(int(found[1]), line, warps)
            is_barrier = "local_alloc" in line and "xi64" in line
            (barriers if is_barrier else values).append(place)
    return [value.line for value in values if any(value.overlaps(barrier) for barrier in barriers)]


def allocated(ttgir: str) -> str:
    """Returns the code with each operation's place in shared memory, as Triton's own pipeline finds it."""
    context = ir.context()
    ir.load_dialects(context)
    nvidia.load_dialects(context)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ttgir"
        file.write_text(ttgir)
        module = ir.parse_mlir_module(str(file), context)
    module.context = context
    manager = ir.pass_manager(context)
    passes.ttgpuir.add_allocate_warp_groups(manager)
    passes.convert.add_scf_to_cf(manager)
    passes.gluon.add_inliner(manager)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, CAPABILITY, PTX_VERSION)
    manager.run(module, "allocated")
    return str(module)


def _place(first: int, line: str, warps: int) -> Place:
    """Returns the most that an operation may have: between warps a sum has a number for each result and warp."""
    sizes = [
        math.prod(map(int, shape.strip("x").split("x"))) * _BYTES.get(dtype, 1)
        for shape, dtype in _SHAPE.findall(line.partition("allocation.offset")[2])
    ]
    size = max(sizes, default=1)
    if "->" in line and "local_alloc" not in line and len(sizes) > 1:
        size = min(sizes[0], sizes[-1] * warps)
    return Place(first, first + size, line.strip())
