"""Which process speaks for a worker id, and what it may not change."""

from __future__ import annotations

from cache_service.core.base.errors import Superseded
from session.errors import InvalidInput
from session.messages import Hello


def check_later(present: Hello, new: Hello) -> None:
    """Of two processes with the same worker id the one that started later is right; 0 says nothing."""
    if present.started_ns and 0 < new.started_ns < present.started_ns:
        ahead_s = (present.started_ns - new.started_ns) / 1e9
        reason = f"an incarnation of {new.worker_id} that started {ahead_s:.3f} s later is here"
        raise Superseded("hello.incarnation", reason)


def check_same(old: Hello, new: Hello) -> None:
    """What one process says of its pages cannot change."""
    for name in ("fingerprint", "page_tokens", "groups", "num_ranks", "model"):
        if getattr(new, name) != getattr(old, name):
            raise InvalidInput(f"hello.{name}", "differs from what this incarnation said before")
