"""Which process owns a worker id, and what its Hello may not change."""

from __future__ import annotations

from cache_service.core.base.errors import Superseded
from session.errors import InvalidInput
from session.messages import Hello


def check_later(present: Hello, new: Hello) -> None:
    """Raises Superseded where the new process started before the present one; a start of 0 is not known."""
    if present.started_ns and 0 < new.started_ns < present.started_ns:
        ahead_s = (present.started_ns - new.started_ns) / 1e9
        reason = f"an incarnation of {new.worker_id} that started {ahead_s:.3f} s later is here"
        raise Superseded("hello.incarnation", reason)


def check_same(old: Hello, new: Hello) -> None:
    """Raises InvalidInput where a process declares other pages than before."""
    for name in ("fingerprint", "page_tokens", "groups", "num_ranks", "model"):
        if getattr(new, name) != getattr(old, name):
            raise InvalidInput(f"hello.{name}", "differs from what this incarnation said before")
