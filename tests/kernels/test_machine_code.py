"""Lines of disassembled kernels, and what is wrong with them."""

from __future__ import annotations

import pytest

from tests.kernels.conftest import INTERPRETING

pytest.importorskip("triton")

from tests.kernels.machine_code import overwritten_operands, unwritten_registers

pytestmark = pytest.mark.skipif(INTERPRETING, reason="the interpreter compiles nothing")

BASE = "UMOV UR4, 0x400 ;"


def code(*lines: str) -> str:
    return "\n".join(f"        /*{place * 16:04x}*/                   {line}" for place, line in enumerate(lines))


def test_what_was_written_may_be_read() -> None:
    assert not unwritten_registers(
        code(
            BASE,
            "ULDC.64 UR6, c[0x0][0x208] ;",
            "@P0 LDG.E R2, desc[UR6][R4.64] ;",
            "@!UP0 UIADD3 UR8, UP0, UR4, 0x20, URZ ;",
            "UIADD3.X UR9, UR8, -0x3ffffff0, URZ, UP0, !UPT ;",
            "UIADD3.64 UR10, UR8, 0x2, URZ ;",
            "HGMMA.64x16x16.F32.BF16 R24, gdesc[UR8].tnspB, RZ, !UPT ;",
        )
    )


@pytest.mark.parametrize(
    "wrong",
    [
        "UIADD3 UR26, UP0, UR26, 0x20, URZ ;",
        "UIADD3.64 UR10, UR4, 0x2, URZ ;",
        "HGMMA.64x16x16.F32.BF16 R24, gdesc[UR4].tnspB, RZ, !UPT ;",
        "HGMMA.64x32x16.F32 R24, R220, gdesc[UR4].tnspB, RZ, !UPT, gsb0 ;",
        "LDG.E R2, desc[UR4][R4.64] ;",
    ],
)
def test_what_nobody_wrote_is_named(wrong: str) -> None:
    found = unwritten_registers(code(BASE, wrong, "UMOV UR5, 0x1 ;"))
    assert [line.strip() for line in found] == [wrong.removesuffix(" ;")]


def test_halves_of_descriptors_that_no_product_looks_at() -> None:
    """The left factor is in registers: its descriptor is empty, and may be copied."""
    product = "HGMMA.64x32x16.F32 R24, R220, gdesc[UR8].tnspB, RZ, !UPT, gsb0 ;"
    lines = ("UMOV UR8, UR20 ;", "UMOV UR9, UR21 ;", "UMOV UR10, UR4 ;", "UMOV UR11, 0x40000040 ;", product)
    assert not unwritten_registers(code(BASE, *lines))
    assert unwritten_registers(code(BASE, *lines, "UIADD3 UR12, UR8, 0x2, URZ ;"))


FIRST, SECOND = (
    "HGMMA.64x128x16.F32 R24, R104, gdesc[UR8].tnspB, RZ, !UPT ;",
    "HGMMA.64x128x16.F32 R24, R116, R24, gsb0 ;",
)
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0 ;"


@pytest.mark.parametrize(
    "wrong",
    ["IMAD.MOV.U32 R105, RZ, RZ, 0x3c003c00 ;", "LDS.128 R116, [R93+UR8] ;", "IMAD.WIDE R106, R130, 0x2, R24 ;"],
)
def test_an_operand_that_is_written_while_a_wgmma_reads_it(wrong: str) -> None:
    before = code(FIRST, SECOND, wrong, WAIT)
    assert [line.strip() for line in overwritten_operands(before)] == [wrong.removesuffix(" ;")]
    assert not overwritten_operands(code(wrong, FIRST, SECOND, WAIT))
    assert not overwritten_operands(code(FIRST, SECOND, WAIT, wrong))


def test_other_registers_may_be_written() -> None:
    lines = ("MUFU.EX2 R103, R24 ;", "LDS.128 R108, [R93+UR8] ;", "STG.E.128 desc[UR12][R104.64], R108 ;")
    assert not overwritten_operands(code(FIRST, SECOND, *lines, WAIT))
