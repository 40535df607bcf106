"""Finds loads of shared memory that may still be on their way when its barrier is arrived at, without a GPU.

The copy engine overtakes such loads: see `release_read` in kernels/hopper/barriers.py. Which loads are of memory that
it fills is read from Triton's own code, which of them are on their way from the machine code, where each instruction
says what it waits for. Both name lines of the source.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# How machine code is disassembled for this: lines of the source, and encodings.
BY_LINE = ("-g", "-hex")
# Keys that a consumer of index_logits gives back without a product, since no row sees them: nobody uses what it loaded.
UNUSED = {"held = keys.index(FIRST).load(HELD)", "held_2 = keys.index(LAST).load(HELD)"}

Place = tuple[str, int]

_SOURCE = re.compile(r'\s*//## File "(.*?)", line (\d+)')
_LABEL = re.compile(r"(\.L_x_\d+):")
_WORDS = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([\w.]+).*?;.*/\* 0x[0-9a-f]{16} \*/")
_ENCODING = re.compile(r"/\* 0x([0-9a-f]{16}) \*/")

_LOCATION = re.compile(r"(#loc\d*) = loc\((.*)\)$")
_FILE_AND_LINE = re.compile(r'"(/[^"]*)":(\d+):\d+')
_DEFINED = re.compile(r"\s*(%\w+) = (ttg\.\w+) ?(%\w+)?")
_FILLED = re.compile(r"ttng\.async_tma_\w+ %\w+\[.*?\] (%\w+),")
_PASSED = re.compile(r"ttg\.warp_specialize\((.*?)\)")
_TAKEN = re.compile(r"\s*partition\d+\((.*)\) num_warps")
_VIEWS = ("ttg.memdesc_",)


@dataclass
class _Instruction:
    name: str
    text: str
    is_conditional: bool
    scoreboard: int  # which counts its result as on its way; 7: none
    waits: int  # a bit for each scoreboard
    line: int
    follows: tuple[int, ...] = ()


def overtaken(code: str, ttgir: str) -> list[str]:
    """Returns the source of loads that the copy engine may overtake, by machine code that was disassembled BY_LINE."""
    loads = loads_of_filled_memory(ttgir)
    if not loads:
        return []
    in_flight = lines_in_flight(code)
    sources = (
        Path(file).read_text().splitlines()[line - 1].strip() for file, line in sorted(loads) if line in in_flight
    )
    return [source for source in sources if source not in UNUSED]


def lines_in_flight(text: str) -> set[int]:
    """Returns lines of the source whose loads of shared memory may be on their way at an arrive behind them.

    Behind a barrier of all threads those count that any of them had on their way there.
    """
    code = _instructions(text)
    on_way: dict[int, tuple[frozenset[int], frozenset[int]]] = {0: (frozenset(), frozenset())}
    found: set[int] = set()
    places = [0]
    while places:
        place = places.pop()
        own, others = on_way[place]
        instruction = code[place]
        own = frozenset(load for load in own if not instruction.waits >> code[load].scoreboard & 1)
        if instruction.name.startswith("FENCE.VIEW.ASYNC"):
            own = frozenset()
        elif instruction.name.startswith("BAR.SYNC") and not instruction.is_conditional:
            others = own
        elif instruction.name.startswith(("SYNCS.ARRIVE", "BAR.ARV")):
            found |= {code[load].line for load in own | others}
        elif instruction.name.startswith("LDS") and instruction.scoreboard < 7:
            own |= {place}
        for following in instruction.follows:
            before = on_way.get(following)
            after = (own, others) if before is None else (own | before[0], others | before[1])
            if after != before:
                on_way[following] = after
                places.append(following)
    unreached = {code[place].name for place in range(len(code)) if place not in on_way}
    assert unreached <= {"BRA", "NOP"}, f"jumps were not understood: nothing leads to {unreached}"
    return found


def _instructions(text: str) -> list[_Instruction]:
    """Of the second half of an instruction's encoding, bits 41 and on are what it waits for and is waited for by."""
    code: list[_Instruction] = []
    labels: dict[str, int] = {}
    line = 0
    rows = text.splitlines()
    for number, row in enumerate(rows):
        if match := _SOURCE.match(row):
            line = int(match[2])
        elif match := _LABEL.match(row):
            labels[match[1]] = len(code)
        elif match := _WORDS.match(row):
            halves = _ENCODING.search(rows[number + 1])
            assert halves is not None
            control = int(halves[1], 16) >> 41
            code.append(_Instruction(match[2], row, bool(match[1]), control >> 5 & 7, control >> 11 & 63, line))
    for place, instruction in enumerate(code):
        instruction.follows = tuple(_following(place, instruction, labels, len(code)))
    return code


def _following(place: int, instruction: _Instruction, labels: dict[str, int], count: int) -> Iterator[int]:
    if instruction.name.startswith("BR"):
        yield from (labels[label] for label in re.findall(r"\.L_x_\d+", instruction.text))
    ends = instruction.name.startswith(("BRX", "EXIT")) or instruction.name == "BRA"
    if place + 1 < count and (instruction.is_conditional or not ends or re.search(r"BRA U?!?U?P", instruction.text)):
        yield place + 1


def loads_of_filled_memory(ttgir: str) -> set[Place]:
    """Returns where the source loads from memory that copies fill: (file, line)."""
    places = dict(match.groups() for row in ttgir.splitlines() if (match := _LOCATION.match(row)))
    memory: dict[str, str] = {}  # what a value is a view of
    passed: list[str] = []
    filled: set[str] = set()
    loads: list[tuple[str, str]] = []
    for number, row in enumerate(ttgir.splitlines()):
        if match := _DEFINED.match(row):
            value, operation, of = match.groups()
            memory[value] = memory.get(of, "") if operation.startswith(_VIEWS) else f"{value} in line {number}"
            if operation == "ttg.local_load":
                loads.append((memory.get(of, ""), row[row.rindex("loc(") + 4 : -1]))
        elif match := _FILLED.search(row):
            filled.add(memory[match[1]])
        elif match := _PASSED.search(row):
            passed = match[1].split(", ")
        elif match := _TAKEN.match(row):
            memory |= {name: memory.get(value, "") for name, value in zip(_names(match[1]), passed, strict=True)}
    return {_place(location, places) for of, location in loads if of in filled}


def _names(arguments: str) -> list[str]:
    return re.findall(r"(%\w+): ", arguments)


def _place(location: str, places: dict[str, str]) -> Place:
    """Returns file and line of a location; of a call's, those within what is called."""
    while (match := _FILE_AND_LINE.search(location)) is None:
        inner = re.search(r"#loc\d*", location)
        assert inner is not None, location
        location = places[inner[0]]
    return match[1], int(match[2])
