"""Runs of an inventory that the manager refuses: each alone, and nothing changes."""

from __future__ import annotations

import pytest

from session.messages import BadRun, CachedRun, RunRefusal
from session.words import Namespace, RefusalReason
from tests.core.inventory_stage import LEFT, RIGHT, TRUNK, WORKER, Stage, run
from tests.core.world import NS, pack

BAD: list[tuple[str, CachedRun]] = [
    ("run", run(0, [1, 2], [9])),
    ("run", run(1, [1, 2], [9])),
    ("parent_run", run(5, [1, 2], [9], parent=4)),
    ("namespace", CachedRun(5, 0, None, pack([1, 2]), (pack([9]),))),
    ("namespace.model", run(5, [1, 2], [9], namespace=Namespace("other"))),
    ("namespace.salt", run(5, [1, 2], [9], namespace=Namespace("model", salt="s" * 300))),
    ("tokens", CachedRun(5, 0, NS, b"", (b"",))),
    ("tokens", CachedRun(5, 0, NS, b"12345", (pack([9]),))),
    ("tokens", run(5, [1, 2, 3], [9])),
    ("tokens", run(5, [1] * 42, list(range(21)))),
    ("page_ids", run(5, [1, 2])),
    ("page_ids", run(5, [1, 2], [9], [9])),
    ("page_ids[0]", run(5, [1, 2], [9, 10])),
    ("page_ids[0]", run(5, [1, 2], [21])),
    ("page_ids[0]", run(5, [1, 2, 3, 4], [9, 9])),
    ("page_ids[0]", run(5, [1, 2, 3, 4], [9, 0])),
]


@pytest.mark.parametrize(("field", "bad"), BAD)
def test_a_bad_run_is_refused_alone_and_changes_nothing(field: str, bad: CachedRun) -> None:
    stage = Stage(max_sequence_tokens=40)
    stage.offer(TRUNK)
    before = stage.manager.stats()
    (refused,) = stage.offer(bad)
    assert (refused.run, refused.reason) == (bad.run, RefusalReason.INVALID)
    assert refused.field == f"step.inventory.runs[0].{field}"
    assert stage.manager.stats() == before
    after = run(6, [5, 6], [3], parent=1)
    assert len(stage.offer(bad, after)) == 1
    assert stage.cached([1, 2, 3, 4, 5, 6]) == 6


def test_a_malformed_run_is_refused_in_its_place() -> None:
    stage = Stage()
    refused = stage.offer(TRUNK, BadRun(2, "tokens", "is empty"))
    assert refused == (RunRefusal(2, RefusalReason.INVALID, "is empty", "step.inventory.runs[1].tokens"),)


def test_a_step_names_no_more_pages_than_it_may() -> None:
    stage = Stage(max_adopt_pages=3)
    refused = stage.offer(TRUNK, RIGHT)
    assert [refusal.field for refusal in refused] == ["step.inventory.runs[1].page_ids"]
    assert stage.offer(RIGHT) == ()


def test_nothing_follows_the_end_of_the_inventory() -> None:
    stage = Stage()
    stage.offer(TRUNK, is_complete=True)
    (refused,) = stage.offer(LEFT)
    assert refused.field == "step.inventory.runs[0].run"
    assert not len(stage.manager.worker(WORKER).restored)


def test_runs_that_bring_nothing_are_bounded() -> None:
    stage = Stage()
    refused: tuple[RunRefusal, ...] = ()
    for number in range(1, 30):
        refused += stage.offer(run(number, [1, 2], [7]))
    assert [refusal.run for refusal in refused] == list(range(21, 30))
