"""Reads the machine code of a kernel for Hopper, without a GPU."""

import re
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

import triton

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(\S+)\s*(.*?);")
_UNIFORM = re.compile(r"(gdesc|desc)?\[?\bUR(\d+)\b")
_WRITERS = ("U", "R2UR", "S2UR", "REDUX", "CS2UR")


def disassembled(cubin: bytes, *options: str) -> str:
    """Returns the machine code of a kernel as text."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        # Without data-flow analysis (-ndf): the text is the same, in 0.18 s of 0.26, but for targets of jumps.
        command = [_TOOLS / "nvdisasm", "-c", *(options or ("-ndf",)), file]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def unwritten_registers(code: str) -> list[str]:
    """Returns the instructions that read a uniform register which none above them writes.

    ptxas 12.8 builds addresses of products from such registers now and then: scans of heads of 12 had wrong rows on an
    H200, and illegal memory accesses, of PTX without a fault.
    """
    written: set[int] = set()
    found = []
    for operation, rest in _INSTRUCTION.findall(code):
        operands = [operand.strip() for operand in rest.split(",")]
        target = _target(operation, operands)
        read = set().union(*(_read(operation, operands, place) for place in range(bool(target), len(operands))))
        if read <= written:
            written |= target
        elif operation.startswith("UMOV"):
            written -= target  # a copy of nothing is nothing: halves of descriptors that nobody looks at
        else:
            found.append(f"{operation} {rest.strip()}")
            written |= target
    return found


def overwritten_operands(code: str) -> list[str]:
    """Returns the instructions that write a register which a wgmma above them reads and nothing has waited for.

    ptxas 12.8 wrote a constant of a left operand after the first of four wgmmas that read it: an H200 gave rows of NaN.
    """
    reading: set[int] = set()
    found = []
    for operation, rest in _INSTRUCTION.findall(code):
        if operation.startswith("HGMMA"):
            left = re.fullmatch(r"R(\d+)", rest.split(",")[1].strip())
            if left:
                reading |= set(range(int(left[1]), int(left[1]) + 4))
        elif operation.startswith("WARPGROUP.DEPBAR"):
            reading.clear()
        elif (target := re.match(r"R(\d+)\b", rest)) and reading & _written(operation, int(target[1])):
            found.append(f"{operation} {rest.strip()}")
    return found


def _written(operation: str, first: int) -> set[int]:
    """Returns the registers that an instruction writes, from its first one on."""
    many = operation.startswith("LD") and (".128" in operation or operation.endswith(".4"))
    return set(range(first, first + (4 if many else 2 if re.search(r"\.(64|WIDE)", operation) else 1)))


def _target(operation: str, operands: list[str]) -> set[int]:
    """Returns the uniform registers that an instruction writes."""
    match = re.fullmatch(r"UR(\d+)", operands[0])
    if match is None or not operation.startswith(_WRITERS):
        return set()
    first = int(match[1])
    return {first, first + 1} if ".64" in operation or ".WIDE" in operation else {first}


def _read(operation: str, operands: list[str], place: int) -> set[int]:
    """Returns the uniform registers of one operand: four of a product's descriptors, two of a pointer or 64 bits."""
    read: set[int] = set()
    for kind, number in _UNIFORM.findall(operands[place]):
        first, count = int(number), 1
        if kind == "gdesc":
            # With its left factor in registers the first descriptor is not looked at.
            has_left = re.fullmatch(r"R\d+(\.\w+)*", operands[1]) is not None
            first, count = (first + 2, 2) if has_left else (first, 4)
        elif kind == "desc" or (".64" in operation and operation.startswith("U")):
            count = 2
        read |= set(range(first, first + count))
    return read
