"""Draw the register of an invented archive: what it holds, as facts and as plain English, one holding to a line."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from types import MappingProxyType

from register_qa.facts import Attribute, Fact, Split, draw_value
from register_qa.words import CONDITIONS, HOOKS, MATERIALS, ROOMS, SHELVES, THINGS, YEARS

MIN_HOLDINGS = 2
MAX_HOLDINGS = 200
HOLDINGS_PER_ROOM = 5
MIN_ROOMS = 4
MAX_ROOMS = 32

# The subject always comes first, so that a model that reads from left to right knows which subject a value belongs to.
# Names in braces are attributes; everything else is copied.
HOLDING_LINES = (
    "The {subject} is kept in the {room} on shelf {shelf}. It was made in {year} and is {condition}.",
    "The {subject}, made in {year}, is kept in the {room} on shelf {shelf} and is {condition}.",
    "The {subject} is {condition}. It was made in {year} and is kept on shelf {shelf} of the {room}.",
    "The {subject} dates from {year} and is {condition}; it is kept in the {room} on shelf {shelf}.",
)
KEY_LINES = (
    "The key to the {subject} hangs on hook {hook}.",
    "The key to the {subject} is kept on hook {hook}.",
)


@dataclass(frozen=True, slots=True)
class Span:
    """Characters start..end (end not included) of a register's text."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Place:
    """Where a fact is in the register: the value's own characters, and the whole line with its line break."""

    value: Span
    line: Span


@dataclass(frozen=True, slots=True)
class Holding:
    """Material and thing together are unique within a register; each alone recurs."""

    material: str
    thing: str
    room: str
    shelf: str
    year: str
    condition: str

    @property
    def name(self) -> str:
        return f"{self.material} {self.thing}"

    def fact(self, attribute: Attribute) -> Fact:
        """Raises ValueError for HOOK, which belongs to a room's key."""
        if attribute is Attribute.HOOK:
            raise ValueError("attribute: a holding has no hook, its room's key has")
        return Fact(self.name, attribute, getattr(self, attribute.value))


@dataclass(frozen=True, slots=True)
class RoomKey:
    room: str
    hook: str

    def fact(self) -> Fact:
        return Fact(self.room, Attribute.HOOK, self.hook)


@dataclass(frozen=True, slots=True)
class Register:
    """`text` is the prefix that its questions share, without a line break at its end; `places` has every fact in it."""

    split: Split
    seed: int
    text: str
    holdings: tuple[Holding, ...]
    room_keys: tuple[RoomKey, ...]
    places: Mapping[Fact, Place]

    def key_of(self, room: str) -> RoomKey:
        return next(key for key in self.room_keys if key.room == room)


def draw_register(seed: int, *, split: Split, holdings: int) -> Register:
    """The same arguments give the same register everywhere. A holding takes about 28 tokens, its room's key included.

    ValueError names `holdings` when it is outside MIN_HOLDINGS..MAX_HOLDINGS.
    """
    if not MIN_HOLDINGS <= holdings <= MAX_HOLDINGS:
        raise ValueError(f"holdings: must be {MIN_HOLDINGS} to {MAX_HOLDINGS}, not {holdings}")
    rng = random.Random(f"register {split.value} {seed}")
    keys = _draw_keys(rng, split, _room_count(holdings))
    drawn = _draw_holdings(rng, split, holdings, [key.room for key in keys])
    lines: list[Holding | RoomKey] = [*drawn, *keys]
    rng.shuffle(lines)
    text, places = _written(rng, f"Register {rng.randrange(1000, 10000)} of the archive.", lines)
    in_order = tuple(line for line in lines if isinstance(line, Holding))
    keys_in_order = tuple(line for line in lines if isinstance(line, RoomKey))
    return Register(split, seed, text, in_order, keys_in_order, MappingProxyType(places))


def _room_count(holdings: int) -> int:
    return min(holdings, max(MIN_ROOMS, min(MAX_ROOMS, holdings // HOLDINGS_PER_ROOM)))


def _draw_keys(rng: random.Random, split: Split, count: int) -> list[RoomKey]:
    """Rooms are distinct, and so are hooks."""
    keys: list[RoomKey] = []
    taken: set[str] = set()
    for room in rng.sample(ROOMS, len(ROOMS)):
        hook = draw_value(rng, room, Attribute.HOOK, HOOKS, split, taken)
        if hook is not None:
            keys.append(RoomKey(room, hook))
            taken.add(hook)
        if len(keys) == count:
            break
    return keys


def _draw_holdings(rng: random.Random, split: Split, count: int, rooms: list[str]) -> list[Holding]:
    """Fewer materials and things than holdings, so that neither word alone says which one is meant."""
    variety = max(4, round(2 * count**0.5))
    materials = rng.sample(MATERIALS, len(MATERIALS))
    things = rng.sample(THINGS, len(THINGS))
    names = [(material, thing) for material in materials[:variety] for thing in things[:variety]]
    rng.shuffle(names)
    # Not every subject has a held-out value among so few rooms: spare subjects replace those.
    spare = ((material, thing) for thing in things[variety:] for material in materials)
    drawn = (_draw_holding(rng, split, *name, rooms) for name in chain(names, spare))
    return list(islice((holding for holding in drawn if holding is not None), count))


def _draw_holding(rng: random.Random, split: Split, material: str, thing: str, rooms: list[str]) -> Holding | None:
    name = f"{material} {thing}"
    room = draw_value(rng, name, Attribute.ROOM, rooms, split)
    shelf = draw_value(rng, name, Attribute.SHELF, SHELVES, split)
    year = draw_value(rng, name, Attribute.YEAR, YEARS, split)
    condition = draw_value(rng, name, Attribute.CONDITION, CONDITIONS, split)
    if room is None or shelf is None or year is None or condition is None:
        return None
    return Holding(material, thing, room, shelf, year, condition)


def _written(rng: random.Random, title: str, lines: list[Holding | RoomKey]) -> tuple[str, dict[Fact, Place]]:
    parts, length = [title], len(title)
    places: dict[Fact, Place] = {}
    for line in lines:
        if isinstance(line, Holding):
            template, subject = rng.choice(HOLDING_LINES), line.name
            told = {a.value: line.fact(a) for a in Attribute if a is not Attribute.HOOK}
        else:
            template, subject = rng.choice(KEY_LINES), line.room
            told = {Attribute.HOOK.value: line.fact()}
        text, values = _filled("\n" + template, subject, told)
        whole = Span(length, length + len(text))
        for fact, value in values:
            places[fact] = Place(Span(length + value.start, length + value.end), whole)
        parts.append(text)
        length += len(text)
    return "".join(parts), places


def _filled(template: str, subject: str, told: Mapping[str, Fact]) -> tuple[str, list[tuple[Fact, Span]]]:
    text = ""
    values: list[tuple[Fact, Span]] = []
    for piece, name in _pieces(template):
        text += piece
        if name == "subject":
            text += subject
        elif name:
            fact = told[name]
            values.append((fact, Span(len(text), len(text) + len(fact.value))))
            text += fact.value
    return text, values


def _pieces(template: str) -> Iterator[tuple[str, str]]:
    """Returns the literal parts, each with the name in the braces behind it; the last name is empty."""
    for part in template.split("{"):
        name, brace, rest = part.partition("}")
        if not brace:
            yield part, ""
            continue
        yield "", name
        yield rest, ""
