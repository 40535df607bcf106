"""Checks of single fields; each failure is an InvalidInput that names the field.

Knows no message.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sized
from enum import IntEnum
from typing import NamedTuple, TypeVar

from cache_service.core.errors import InvalidInput, TooMany
from cache_service.core.types import PAGE_ID_BYTES, TOKEN_BYTES, SequenceId

E = TypeVar("E", bound=IntEnum)

SEQUENCE_ID_BYTES = 8
MAX_TEXT = 256
MAX_GROUPS = 32
MAX_PAGE_TOKENS = 65_536
MAX_PAGES = 2**31 - 1


class Limits(NamedTuple):
    """The most that one message may ask for."""

    max_prompt_tokens: int = 1_048_576
    max_live_sequences: int = 4_096
    max_items: int = 8_192


def text(value: str, field: str, *, required: bool = False, most: int = MAX_TEXT) -> str:
    if required and not value:
        raise InvalidInput(field, "must not be empty")
    if len(value) > most:
        raise InvalidInput(field, f"has {len(value)} characters; at most {most}")
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


def at_most(items: Sized, field: str, most: int) -> None:
    if len(items) > most:
        raise TooMany(field, f"has {len(items)} items; at most {most}")


def unique(values: Iterable[object], field: str) -> None:
    seen = set()
    for value in values:
        if value in seen:
            raise InvalidInput(field, f"names {value} twice")
        seen.add(value)


def packed(value: bytes, field: str, width: int) -> int:
    """The number of items in a packed field."""
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


def page_ids(value: bytes, field: str, most: int) -> bytes:
    count = packed(value, field, PAGE_ID_BYTES)
    if count > most:
        raise InvalidInput(field, f"has {count} pages; at most {most}")
    return value


def sequence_ids(value: bytes, field: str, most: int) -> tuple[SequenceId, ...]:
    count = packed(value, field, SEQUENCE_ID_BYTES)
    if count > most:
        raise TooMany(field, f"has {count} items; at most {most}")
    ids: tuple[SequenceId, ...] = struct.unpack(f"<{count}Q", value)
    if len(set(ids)) != count:
        unique(ids, field)
    return ids
