"""How long ago the parts of a prompt were last used on one worker, and when what is missing went. Reads only.

A node has been used for as long as a lease held it or one behind it; `used_ms` is when the last one let go, to the
step. So heads are used no longer ago than tails.
"""

from __future__ import annotations

from typing import NamedTuple

from cache_service.core.base.types import Age
from cache_service.core.device_cache import DeviceCache
from cache_service.core.verbs.prefix_match import PrefixMatch
from session.words import MissReason

# Neighbours are one part while their ages differ by less than this, or by less than a factor of two: 18 parts in a day.
SAME_MS = 1_000

IN_USE = Age(0, 0)


class UsedPart(NamedTuple):
    """Pages of the prompt up to page number `end`, from the part before on."""

    end: int
    age: Age


def used_parts(cache: DeviceCache, found: PrefixMatch, now_ms: int) -> list[UsedPart]:
    """Returns the usable pages by how long ago they were last used; `IN_USE`: held by a sequence, or by a spill."""
    walk, usable = found.walk, found.usable_pages
    parts: list[UsedPart] = []
    for node in (*cache.tree.path(walk.node), *([walk.child] if walk.child is not None and walk.pages else [])):
        if node.start >= usable:
            break
        age_ms = least_ms = 0 if node.pins else max(now_ms - node.used_ms, 0)
        if parts and _is_same(parts[-1].age, age_ms):
            least_ms = parts.pop().age.least_ms
        parts.append(UsedPart(min(node.end, usable), Age(least_ms, age_ms)))
    return parts


def _is_same(age: Age, age_ms: int) -> bool:
    """Returns whether two neighbours count as one part; the former was not used longer ago."""
    least_ms = age.least_ms
    return (age == IN_USE) == (age_ms == 0) and age_ms < max(2 * least_ms, least_ms + SAME_MS)


def gone_age(cache: DeviceCache, found: PrefixMatch, tokens: bytes, now_ms: int) -> Age | None:
    """Returns between how long ago the first missing page was evicted or cleared; None where nothing is known of it."""
    if found.reason not in (MissReason.EVICTED, MissReason.CLEARED):
        return None
    ghosts = cache.tree.ghosts
    ghost = cache.tree.run_marks.find(found.walk.node.root, tokens, found.matched_pages)
    if ghost is None:
        return None
    after_ms, until_ms = cache.unit_times.window(ghosts.unit - ghost.age, ghosts.cut_pages)
    return Age(0 if until_ms is None else max(now_ms - until_ms, 0), max(now_ms - after_ms, 0))
