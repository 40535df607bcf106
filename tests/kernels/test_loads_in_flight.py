"""loads_in_flight: machine code and Triton's code with a load that is on its way, or is not, at an arrive."""

from __future__ import annotations

import pytest

from tests.kernels.loads_in_flight import lines_in_flight, loads_of_filled_memory

LOAD = ("LDS.128 R4, [R2+UR8] ;", 0, 0)
WAIT = ("IMAD.U32 R3, R4, 0x10000, RZ ;", 7, 0b1)
OTHER_WAIT = ("IMAD.U32 R3, R9, 0x10000, RZ ;", 7, 0b10)
BARRIER = ("BAR.SYNC.DEFER_BLOCKING 0x2, 0x80 ;", 7, 0)
FENCE = ("FENCE.VIEW.ASYNC.S ;", 7, 0)
ARRIVE = ("@!P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R8+UR8], RZ ;", 7, 0)
OWN_ARRIVE = ("BAR.ARV 0x8, 0x120 ;", 7, 0)
JUMP = ("@P0 BRA `(.L_x_1) ;", 7, 0)
END = ("EXIT ;", 7, 0)

Line = tuple[str, int, int]


def code(*lines: Line) -> str:
    """Disassembled, each instruction of a source line of its own, counted from 1; .L_x_1 is the first one."""
    rows = [".L_x_1:"]
    for place, (text, scoreboard, waits) in enumerate(lines):
        rows += [
            f'\t//## File "/kernels/some.py", line {place + 1}',
            f"        /*{place * 16:04x}*/                   {text}          /* 0x{0:016x} */",
            f"                                                   /* 0x{(waits << 11 | scoreboard << 5) << 41:016x} */",
        ]
    return "\n".join(rows)


@pytest.mark.parametrize(
    "lines",
    [
        (LOAD, BARRIER, ARRIVE, WAIT),
        (LOAD, BARRIER, WAIT, ARRIVE),  # which waits for this thread's load, not for the others'
        (LOAD, OTHER_WAIT, BARRIER, ARRIVE, WAIT),
        (LOAD, BARRIER, FENCE, ARRIVE),
        (LOAD, OWN_ARRIVE, WAIT),
        (LOAD, ARRIVE),
    ],
)
def test_a_load_on_its_way_is_found(lines: tuple[Line, ...]) -> None:
    assert lines_in_flight(code(*lines, END)) == {1}


@pytest.mark.parametrize(
    "lines",
    [
        (LOAD, WAIT, BARRIER, ARRIVE),
        (LOAD, FENCE, BARRIER, ARRIVE, WAIT),
        (LOAD, WAIT, OWN_ARRIVE),
        (BARRIER, ARRIVE, LOAD, WAIT),
        (LOAD, BARRIER, WAIT, BARRIER, ARRIVE),
    ],
)
def test_a_load_that_has_ended_is_not(lines: tuple[Line, ...]) -> None:
    assert not lines_in_flight(code(*lines, END))


def test_a_load_of_the_turn_before() -> None:
    assert lines_in_flight(code(BARRIER, ARRIVE, LOAD, JUMP, END)) == {3}
    assert not lines_in_flight(code(BARRIER, ARRIVE, LOAD, WAIT, JUMP, END))


def test_code_that_nothing_leads_to() -> None:
    with pytest.raises(AssertionError, match="jumps were not understood"):
        lines_in_flight(code(BARRIER, END, LOAD, END))


WARPS = """
#loc3 = loc("/kernels/consumer.py":7:1)
#loc4 = loc("/kernels/consumer.py":8:1)
#loc5 = loc("/kernels/kernel.py":30:1)
    %ring = ttg.local_alloc : () -> !ttg.memdesc<3x64xbf16> loc(#loc5)
    %own = ttg.local_alloc : () -> !ttg.memdesc<64xbf16> loc(#loc5)
    ttg.warp_specialize(%ring, %desc, %own) attributes {requestedRegisters = array<i32: 40>}
    default {
      %2 = ttg.memdesc_index %ring[%slot] : !ttg.memdesc<3x64xbf16> -> !ttg.memdesc<64xbf16> loc(#loc5)
      ttng.async_tma_copy_global_to_local %desc[%a, %b] %2, %bar, %true : !tt.tensordesc<tensor<64xbf16>> loc(#loc5)
    }
    partition0(%arg5: !ttg.memdesc<3x64xbf16> loc(unknown), %arg6: f32, %arg7: !ttg.memdesc<64xbf16>) num_warps(4)
      %2 = ttg.memdesc_index %arg5[%slot] : !ttg.memdesc<3x64xbf16> -> !ttg.memdesc<64xbf16> loc(#loc5)
      %3 = ttg.memdesc_trans %2 {order = array<i32: 1, 0>} : !ttg.memdesc<64xbf16> -> !ttg.memdesc<64xbf16> loc(#loc5)
      %x = ttg.local_load %3 : !ttg.memdesc<64xbf16> -> tensor<64xbf16> loc(#loc6)
      %y = ttg.local_load %arg7 : !ttg.memdesc<64xbf16> -> tensor<64xbf16> loc(#loc4)
    }
#loc6 = loc("x"(#loc7))
#loc7 = loc(callsite(#loc3 at #loc5))
"""


def test_loads_of_what_copies_fill() -> None:
    assert loads_of_filled_memory(WARPS) == {("/kernels/consumer.py", 7)}
