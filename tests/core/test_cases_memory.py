"""E21: a prefix that ten thousand sequences share is kept once; a tree costs little beyond tokens."""

from __future__ import annotations

import tracemalloc
from array import array

from cli.replay.replay import NAMESPACE, WORKER, make_manager
from session.messages import Acquire, Grant, Publish, Release
from session.words import ReleaseReason, SequenceId
from tests.core import audit

SHARED, UNIQUE, SEQUENCES, PAGE = 10_000, 100, 10_000, 16


def test_e21_a_shared_prefix_is_kept_once() -> None:
    manager = make_manager(0, PAGE, "lru")
    shared = array("i", range(SHARED)).tobytes()
    tracemalloc.start()
    for number in range(SEQUENCES):
        own = array("i", [100_000 + number] * UNIQUE).tobytes()
        grant = manager.acquire(WORKER, Acquire(SequenceId(number), NAMESPACE, shared + own))
        assert isinstance(grant, Grant)
        assert grant.cached_tokens == (SHARED if number else 0)
        manager.publish(WORKER, Publish(SequenceId(number), b"", SHARED + UNIQUE))
        manager.release(WORKER, Release(SequenceId(number), ReleaseReason.FINISHED))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    audit.check(manager)
    entries = SHARED + SEQUENCES * UNIQUE
    group = manager.stats().workers[0].groups[0]
    assert group.num_evictable * PAGE == SHARED + SEQUENCES * (UNIQUE // PAGE * PAGE)
    # The bound allows two words of eight bytes for each token: keys, page ids and nodes together.
    assert held < 2 * 8 * entries, f"{held / entries:.1f} bytes for each token"
