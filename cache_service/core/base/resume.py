"""Resume rules: at which page boundaries can a sequence continue, group kind by group kind.

Knows no tree: it reads packed page ids in prompt order, where NO_PAGE is a hole.

    FULL        every page of [0, b)
    WINDOW(w)   the pages that cover the last w - 1 tokens before b
    STATE       the snapshot at b, which stands at page number b - 1
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from session.words import PAGE_ID_BYTES, GroupKind, GroupSpec

_RESIDENT = b"\1"


def window_pages(spec: GroupSpec, page_tokens: int) -> int:
    """How many whole pages before a boundary a WINDOW group needs, away from the start."""
    return -(-(spec.window_tokens - 1) // page_tokens)


def residency(page_ids: bytes | bytearray) -> bytes:
    """One byte for each page: 1 where it is resident."""
    ids = array("I")
    ids.frombytes(page_ids)
    return bytes(map(bool, ids))


def _resume_full(resident: bytes, limit: int) -> int:
    hole = resident.find(b"\0", 0, limit)
    return limit if hole < 0 else hole


def _resume_window(resident: bytes, limit: int, run: int) -> int:
    if run == 0:
        return limit
    start = resident.rfind(_RESIDENT * run, 0, limit)
    if start >= 0:
        return start + run
    # No whole run: only a boundary so near the start that the window begins at token 0.
    return min(_resume_full(resident, limit), run - 1)


def _resume_state(resident: bytes, limit: int) -> int:
    return resident.rfind(_RESIDENT, 0, limit) + 1


def resume_one(spec: GroupSpec, page_tokens: int, resident: bytes, limit: int) -> int:
    """The largest boundary, in pages, at most `limit`, at which this group alone can resume."""
    limit = min(limit, len(resident)) if spec.kind != GroupKind.WINDOW or spec.window_tokens > 1 else limit
    if spec.kind == GroupKind.FULL:
        return _resume_full(resident, limit)
    if spec.kind == GroupKind.WINDOW:
        return _resume_window(resident, limit, window_pages(spec, page_tokens))
    return _resume_state(resident, limit)


def resume(specs: Sequence[GroupSpec], page_tokens: int, resident: Sequence[bytes], limit: int) -> int:
    """The largest boundary at which every group can resume: sweeps until no group lowers it any more."""
    boundary = limit
    while True:
        before = boundary
        for spec, flags in zip(specs, resident, strict=True):
            boundary = resume_one(spec, page_tokens, flags, boundary)
        if boundary == before:
            return boundary


def limiting_group(
    specs: Sequence[GroupSpec], page_tokens: int, resident: Sequence[bytes], limit: int
) -> GroupSpec | None:
    """The first group that cannot resume at `limit` itself."""
    for spec, flags in zip(specs, resident, strict=True):
        if resume_one(spec, page_tokens, flags, limit) < limit:
            return spec
    return None


def window_start(boundary_tokens: int, spec: GroupSpec, page_tokens: int) -> int:
    """The first page that a launch from `boundary_tokens` on still reads."""
    return max(0, boundary_tokens - (spec.window_tokens - 1)) // page_tokens


def holes(num_pages: int) -> bytearray:
    return bytearray(num_pages * PAGE_ID_BYTES)
