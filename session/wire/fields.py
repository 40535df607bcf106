"""Checks of single fields; each failure is an InvalidInput or a TooMany that names the field."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from enum import IntEnum
from typing import TypeVar

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from session.errors import InvalidInput, TooMany
from session.limits import MAX_NAME_CHARS
from session.words import TOKEN_BYTES, SequenceId

E = TypeVar("E", bound=IntEnum)

SEQUENCE_ID_BYTES = 8


def nothing_unknown(message: Message, field: str) -> None:
    """Raises InvalidInput for fields that this service does not know: one may be part of an identity."""
    unknown = UnknownFieldSet(message)
    if len(unknown):
        number = unknown[0].field_number
        raise InvalidInput(field, f"has a field {number}, which this version of the service does not know")


def text(value: str, field: str, *, required: bool = False) -> str:
    if required and not value:
        raise InvalidInput(field, "must not be empty")
    if len(value) > MAX_NAME_CHARS:
        raise InvalidInput(field, f"has {len(value)} characters; at most {MAX_NAME_CHARS}")
    return value


def in_range(value: int, field: str, low: int, high: int) -> int:
    if not low <= value <= high:
        raise InvalidInput(field, f"is {value}; must be {low}..{high}")
    return value


def amount(value: float, field: str) -> float:
    if not (math.isfinite(value) and value >= 0):
        raise InvalidInput(field, "must be a finite number, not below 0")
    return value


def member(kind: type[E], value: int, field: str) -> E:
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(f"{item.value} ({item.name})" for item in kind)
        raise InvalidInput(field, f"is {value}; must be one of {known}") from None


def at_most(num_items: int, field: str, most: int) -> None:
    if num_items > most:
        raise TooMany(field, f"has {num_items} items; at most {most}")


def unique(values: Iterable[object], field: str) -> None:
    seen = set()
    for value in values:
        if value in seen:
            raise InvalidInput(field, f"names {value} twice")
        seen.add(value)


def packed(value: bytes, field: str, width: int) -> int:
    """Returns the number of items in a packed field."""
    count, rest = divmod(len(value), width)
    if rest:
        raise InvalidInput(field, f"has {len(value)} bytes, which is no multiple of {width}")
    return count


def tokens(value: bytes, field: str, most: int, *, required: bool = False) -> bytes:
    count = packed(value, field, TOKEN_BYTES)
    if required and not count:
        raise InvalidInput(field, "must not be empty")
    if count > most:
        raise InvalidInput(field, f"has {count} tokens; at most {most}")
    return value


def sequence_ids(value: bytes, field: str) -> tuple[SequenceId, ...]:
    ids: tuple[SequenceId, ...] = struct.unpack(f"<{packed(value, field, SEQUENCE_ID_BYTES)}Q", value)
    return ids
