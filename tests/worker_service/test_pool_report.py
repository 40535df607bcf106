"""What a worker says of its pools at the start: capacity, the shortest prompt that can hit, and what can never be."""

from __future__ import annotations

import pytest

from session.words import GroupKind, GroupSpec
from worker_service.gpu.pool_report import pool_report

FULL = GroupSpec("full", GroupKind.FULL, num_pages=100, page_bytes=1 << 20)
WINDOW = GroupSpec("window8", GroupKind.WINDOW, num_pages=40, page_bytes=1 << 18, window_tokens=8)


def test_capacity_is_in_tokens() -> None:
    report = pool_report([FULL, WINDOW], 16, 1024, 8)
    assert [group.capacity_tokens for group in report.groups] == [1600, 640]
    assert [group.size_mb for group in report.groups] == [100, 10]
    assert (report.least_hit_tokens, report.warning) == (17, None)


@pytest.mark.parametrize(("max_model_len", "can_hit"), [(16, False), (17, False), (18, True)])
def test_a_model_shorter_than_a_page_and_two_tokens_never_hits(max_model_len: int, can_hit: bool) -> None:
    warning = pool_report([FULL], 16, max_model_len, 8).warning
    assert (warning is None) is can_hit
    assert warning is None or ("17 tokens" in warning and "page_tokens" in warning)


@pytest.mark.parametrize(("slots", "snapshots"), [(7, 0), (8, 0), (9, 1), (40, 32)])
def test_slots_that_running_sequences_leave_are_for_snapshots(slots: int, snapshots: int) -> None:
    state = GroupSpec("state", GroupKind.STATE, num_pages=slots, page_bytes=1 << 20)
    report = pool_report([FULL, state], 64, 1024, 8)
    assert report.groups[1] == ("state", slots, 0, slots, 1.0, snapshots)
    assert (report.warning is None) is (snapshots > 0)
    assert report.warning is None or "while 8 sequences run: group state" in report.warning
