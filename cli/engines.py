"""Formats the counts of other projects' engines: what they asked, found and wrote, and why they missed."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import RenderableType

from cli.output import plain, table
from protos.v1 import cache_pb2

_Counts = cache_pb2.AttachmentStats | cache_pb2.AttachedEngine

# Attachments whose addresses are shown.
MAX_PLACES = 16

_ALL = "all since the start"
_NO_MISS = "none"


def engine_tables(stats: cache_pb2.AttachmentStats) -> list[RenderableType]:
    """Returns the tables; none where no engine has ever looked anything up or written anything."""
    if not (stats.num_attachments or stats.num_lookups or stats.reserved_pages):
        return []
    engines = sorted(stats.engines, key=lambda one: (-one.num_lookups, one.attachment))
    looked = [(plain(one.engine), main_reason(one), one.attachment, *_looked_up(one)) for one in engines]
    moved = [(plain(one.engine), one.attachment, *_moved(one)) for one in engines]
    looked.append((_ALL, main_reason(stats), "", *_looked_up(stats)))
    moved.append((_ALL, "", *_moved(stats)))
    title = "engines attached to the host tier"
    columns = ("engine", "mostly missed", "attach-\nment", "lookups", "asked\npages", "found\npages", "hit rate")
    return [
        table(title, columns, looked, left=2),
        table(
            f"{title}: pages",
            ("engine", "attach-\nment", "read", "written", "refused", "given\nup", "leases", "tickets"),
            moved,
        ),
    ]


def engine_places(stats: cache_pb2.AttachmentStats) -> list[RenderableType]:
    """Returns where each engine runs, and under which fingerprint: engines of the same one share pages."""
    engines = sorted(stats.engines, key=lambda one: one.attachment)
    lines = []
    for one in engines[:MAX_PLACES]:
        _, _, address = one.peer.partition(":")
        fingerprint = one.key_prefix.rstrip(":").rpartition(":")[2]
        lines.append(f"attachment {one.attachment} calls from {plain(address)}; fingerprint {plain(fingerprint[:12])}")
    if len(engines) > MAX_PLACES:
        lines.append(f"and {len(engines) - MAX_PLACES:,} more: --json has them")
    return ["\n".join(lines)] if lines else []


def _looked_up(one: _Counts) -> tuple[object, ...]:
    rate = f"{one.usable_pages / one.asked_pages:.1%}" if one.asked_pages else "-"
    return one.num_lookups, one.asked_pages, one.usable_pages, rate


def _moved(one: _Counts) -> tuple[object, ...]:
    written = one.fetched_pages, one.committed_pages, one.refused_pages, one.given_up_pages
    return *written, one.num_leases, one.num_tickets


def main_reason(one: _Counts) -> str:
    """Returns why most Lookups that did not find everything found no more, and how many said so."""
    if not one.num_lookups:
        return "no lookup yet"
    misses: Mapping[str, int] = {reason: count for reason, count in one.misses.items() if reason != _NO_MISS}
    if not misses:
        return "nothing" if one.asked_pages else "no whole page asked"
    reason = min(misses, key=lambda each: (-misses[each], each))
    return f"{reason.replace('_', ' ')}: {misses[reason]:,}"
