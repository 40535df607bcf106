"""Formats what Explain tells of attached engines: how far each could resume a path of pages, and why no further."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group, RenderableType

from cli.explanation import span
from cli.output import plain, stacked, table
from cli.views import words
from protos.v1 import cache_pb2, types_pb2


def engines_explained(explained: Iterable[cache_pb2.AttachmentExplanation]) -> RenderableType:
    """For each attached engine how far it could resume a path of pages, by group, and why no further."""
    views = [_explained(one) for one in explained]
    return stacked(views) if views else "no engine is attached"


def _explained(one: cache_pb2.AttachmentExplanation) -> RenderableType:
    rows = [_group_row(group) for group in one.groups]
    columns = ("group", "kind", "why not", "first\nmissing", "leading\npages", "pages\nthere", "can\nresume at")
    limited = f", limited by group {plain(one.limiting_group)}" if one.limiting_group else ""
    verdict = f"{one.usable_pages:,} ({one.usable_tokens:,} tokens) can be used{limited}"
    title = f"attachment {one.attachment} ({plain(one.engine)}): {_asked(one)} of {one.page_tokens} tokens; {verdict}"
    return Group(table(title, columns, rows, left=3), "", *(plain(note) for note in one.notes))


def _asked(one: cache_pb2.AttachmentExplanation) -> str:
    if not one.HasField("lookup_age_ms"):
        return f"{one.num_pages:,} pages"
    held = f", {one.local_pages:,} of them its own," if one.local_pages else ""
    return f"its lookup of {span(one.lookup_age_ms / 1000)} ago, {one.num_pages:,} pages{held}"


def _group_row(group: cache_pb2.TierGroupExplanation) -> tuple[object, ...]:
    is_missing = group.HasField("missing_page")
    return (
        plain(group.name),
        words(types_pb2.GroupKind.Name(group.kind), "GROUP_KIND_") + ", replicated" * group.replicated,
        words(types_pb2.MissReason.Name(group.miss_reason), "MISS_REASON_") if is_missing else "",
        group.missing_page if is_missing else "",
        group.leading_pages,
        group.resident_pages,
        group.usable_pages,
    )
