"""Formats what Explain tells: where each stretch of a prompt is, since when, and why the rest is not there."""

from __future__ import annotations

from rich.console import Group, RenderableType

from cli.output import plain, table
from cli.views import words
from protos.v1 import cache_pb2, types_pb2

# What becomes of tokens that the host tier has and that are not fetched.
_DECLINED: dict[types_pb2.MissReason.ValueType, str] = {
    types_pb2.MISS_REASON_FETCH_SLOWER: "are in the host tier, and computed sooner",
    types_pb2.MISS_REASON_FETCH_BUSY: "are in the host tier, and too many fetches under way",
    types_pb2.MISS_REASON_BREAKER_OPEN: "are in the host tier, and fetches are paused",
}


def explanation_view(num_tokens: int, explained: cache_pb2.ExplainResponse) -> RenderableType:
    """Returns where each stretch of the prompt is on each worker, the best worker first."""
    if not explained.workers:
        return "no worker of this model is known to the cache service"
    workers = sorted(explained.workers, key=lambda one: (-_within_reach(one), -one.match.usable_tokens, one.worker_id))
    rows = [row for one in workers for row in _stretches(one)]
    title = f"{num_tokens:,} prompt tokens; {_verdict(workers[0])}"
    notes = [
        f"{plain(one.worker_id)}: {plain(note)}"
        for one in workers
        for note in (*_held(one), *_pin_note(one), *one.notes)
    ]
    return Group(table(title, ("worker", "tokens", "where", "why not", "when", "count"), rows, left=5), "", *notes)


def _held(one: cache_pb2.WorkerExplanation) -> list[str]:
    """Returns which sequences and spills keep how much of it from being evicted."""
    notes = []
    if one.num_holders:
        named = ", ".join(f"{holder.sequence_id} ({holder.num_tokens:,} tokens)" for holder in one.holders)
        more = one.num_holders - len(one.holders)
        s = "s" * (one.num_holders > 1)
        notes.append(f"held by {one.num_holders:,} running sequence{s}: {named}{f' and {more:,} more' * (more > 0)}")
    if one.spilling_tokens:
        notes.append(f"{one.spilling_tokens:,} tokens are held while they are copied to the host tier")
    return notes


def _pin_note(one: cache_pb2.WorkerExplanation) -> list[str]:
    if not one.pinned_tokens:
        return []
    return [f"the first {one.pinned_tokens:,} tokens are pinned, for {span(one.pin_left_ms / 1000)} more"]


def span(seconds: float) -> str:
    """Returns a time in the largest unit of which there are two or more: 90 s, 3 min, 47 h."""
    for unit, size_s in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size_s:
            return f"{seconds / size_s:.0f} {unit}"
    return f"{seconds:.0f} s"


def _within_reach(one: cache_pb2.WorkerExplanation) -> int:
    return one.match.usable_tokens + one.match.host_tokens


def _verdict(best: cache_pb2.WorkerExplanation) -> str:
    if not _within_reach(best):
        return "no worker can reuse any"
    there = f"{best.match.usable_tokens:,} are there"
    how = _DECLINED.get(best.match.miss_reason, "can be fetched")
    fetched = f", {best.match.host_tokens:,} {how}" if best.match.host_tokens else ""
    return f"best on {plain(best.worker_id)}: {there}{fetched}"


def _stretches(one: cache_pb2.WorkerExplanation) -> list[tuple[object, ...]]:
    return [
        (
            plain(one.worker_id) if at == 0 else "",
            f"{segment.first_token:,} .. {segment.first_token + segment.num_tokens - 1:,}",
            _residence(segment.residence),
            _reason(segment.miss_reason) if segment.residence == cache_pb2.RESIDENCE_MISSING else "",
            _when(segment),
            segment.num_tokens,
        )
        for at, segment in enumerate(one.segments)
    ]


def _when(segment: cache_pb2.Segment) -> str:
    """Returns when it was last used or evicted; nothing where the cache service does not say."""
    if segment.HasField("gone"):
        return f"went {_ago(segment.gone)}"
    if not segment.HasField("last_used"):
        return ""
    return f"used {_ago(segment.last_used)}" if segment.last_used.most_ms else "in use"


def _ago(age: cache_pb2.Age) -> str:
    least, most = span(age.least_ms / 1000), span(age.most_ms / 1000)
    if least == most:
        return f"{most} ago"
    return f"{least} to {most} ago" if age.least_ms else f"at most {most} ago"


def _residence(residence: cache_pb2.Residence.ValueType) -> str:
    word = words(cache_pb2.Residence.Name(residence), "RESIDENCE_")
    return {"device": "[green]device[/green]", "host": "[cyan]host tier[/cyan]"}.get(word, word)


def _reason(reason: types_pb2.MissReason.ValueType) -> str:
    return words(types_pb2.MissReason.Name(reason), "MISS_REASON_")
