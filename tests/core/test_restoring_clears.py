"""Clear calls and workers that come back: what is older than the call stays out, and each worker is told of it."""

from __future__ import annotations

import pytest

from cache_service.core.base.cleared_scopes import MAX_LEFT, MAX_SCOPES, ClearedScopes
from session.messages import Adopt, Forget
from session.words import GroupPages, Namespace, RefusalReason, SequenceId
from tests.core.at_once import clear_at_once
from tests.core.inventory_stage import LEFT, TENANT, TRUNK, WORKER, Stage, run
from tests.core.world import NS, pack


def test_a_clear_between_two_slices_keeps_the_rest_of_its_namespace_out() -> None:
    stage = Stage()
    stage.offer(TRUNK, run(2, [1, 2], [9], namespace=TENANT))
    clear_at_once(stage.manager, TENANT, unused_only=False)
    refused = stage.offer(run(4, [3, 4], [10], parent=2), run(5, [7, 7], [13], namespace=TENANT), LEFT_LATER)
    details = {4: "the run before it was evicted", 5: "the namespace was cleared"}
    assert {refusal.run: refusal.detail for refusal in refused} == details
    assert stage.cached([1, 2], TENANT) == 0
    assert stage.cached([1, 2, 3, 4, 5, 6]) == 6
    clear_at_once(stage.manager, None, unused_only=False)
    (refused_run,) = stage.offer(run(9, [1, 2], [7]))
    assert refused_run.field == "step.inventory.runs[0].run"


LEFT_LATER = run(6, [5, 6], [3], parent=1)


def test_a_clear_of_what_nobody_holds_keeps_runs_out_behind_what_somebody_holds() -> None:
    stage = Stage()
    assert stage.offer(TRUNK) == ()
    assert stage.acquire(1, [1, 2, 3, 4, 7]).cached_tokens == 4
    clear_at_once(stage.manager, NS, unused_only=True)
    (refused,) = stage.offer(LEFT)
    assert (refused.reason, refused.detail) == (RefusalReason.NO_ROOM, "the namespace was cleared")
    assert stage.cached([1, 2, 3, 4, 5, 6]) == 4


@pytest.mark.parametrize("cleared", [NS, None])
def test_a_clear_before_an_adopt_keeps_its_pages_out(cleared: Namespace | None) -> None:
    """The sequence queues again and is computed anew; one that leaves nothing for others goes on."""
    stage = Stage()
    clear_at_once(stage.manager, cleared, unused_only=False)
    (refusal,) = stage.step(adopts=(_adopt(1, [1, 2, 3], [7, 5]),)).refusals
    assert (refusal.reason, refusal.detail) == (RefusalReason.NO_ROOM, "the namespace was cleared")
    assert stage.cached([1, 2]) == 0
    bypassing = _adopt(2, [1, 2, 3], [7, 5])._replace(bypass_cache=True)
    assert len(stage.step(adopts=(bypassing,)).grants) == 1
    assert stage.cached([1, 2]) == 0


@pytest.mark.parametrize("cleared", [NS, None])
def test_a_clear_while_a_worker_is_away_keeps_out_what_is_older(cleared: Namespace | None) -> None:
    """Its state has been dropped, so that no lease tells the Clear call of the sequence."""
    stage = Stage(grace_ms=10)
    stage.acquire(1, [1, 2, 3])
    stage.go_away()
    clear_at_once(stage.manager, cleared, unused_only=False)
    stage.come_back()
    (refusal,) = stage.step(adopts=(_adopt(1, [1, 2, 3], [7, 5]),)).refusals
    assert (refusal.reason, refusal.detail) == (RefusalReason.NO_ROOM, "the namespace was cleared")
    assert stage.cached([1, 2]) == 0
    other = _adopt(2, [1, 2, 3], [7, 5])._replace(namespace=TENANT)
    assert len(stage.step(adopts=(other,)).grants) == (cleared is not None)


def test_a_clear_that_was_missed_once_is_missed_until_everything_is_adopted() -> None:
    stage = Stage(grace_ms=10)
    stage.go_away()
    clear_at_once(stage.manager, NS, unused_only=False)
    for _ in range(2):  # nothing was adopted yet
        stage.come_back()
        stage.go_away()
    stage.come_back()
    assert stage.step(adopts=(_adopt(1, [1, 2, 3], [7, 5]),)).refusals
    stage.offer(is_complete=True)
    stage.acquire(1, [1, 2, 3])
    stage.go_away()
    stage.come_back()
    assert stage.step(adopts=(_adopt(1, [1, 2, 3], [7, 5]),)).grants, "it began after the Clear call"
    assert stage.cached([1, 2]) == 2


def test_a_sequence_that_a_clear_left_alone_is_adopted_later() -> None:
    stage = Stage(grace_ms=10)
    stage.offer(is_complete=True)
    stage.acquire(1, [1, 2, 3])
    clear_at_once(stage.manager, None, unused_only=True)
    stage.go_away()
    stage.come_back()
    assert stage.step(adopts=(_adopt(1, [1, 2, 3], [7, 5]),)).grants


def test_incarnations_without_a_state_are_bounded() -> None:
    scopes = ClearedScopes()
    for number in range(MAX_LEFT + 1):
        scopes.leave(WORKER, str(number), 3)
    assert (scopes.come_back(WORKER, "0"), scopes.come_back(WORKER, "1")) == (0, 3)
    assert scopes.come_back(WORKER, "1") == 0


def _adopt(number: int, tokens: list[int], page_ids: list[int]) -> Adopt:
    return Adopt(SequenceId(number), NS, pack(tokens), len(tokens) - 1, (GroupPages(0, 0, pack(page_ids)),))


def test_cleared_namespaces_of_a_state_are_bounded() -> None:
    stage = Stage()
    for number in range(MAX_SCOPES + 1):
        clear_at_once(stage.manager, Namespace("model", salt=str(number)), unused_only=True)
    restored = stage.manager.worker(WORKER).restored
    assert not restored.is_open
    assert restored.is_cleared(TENANT)
    (refused,) = stage.offer(run(1, [1, 2], [7]))
    assert refused.field == "step.inventory.runs[0].run"


def test_workers_are_told_what_was_cleared_and_confirm_it() -> None:
    stage = Stage()
    assert stage.manager.take_orders(WORKER) == ()
    clear_at_once(stage.manager, TENANT, unused_only=True)
    (forget,) = stage.manager.take_orders(WORKER)
    assert isinstance(forget, Forget)
    assert (forget.everything, forget.namespaces) == (False, (TENANT,))
    assert stage.manager.take_orders(WORKER) == ()
    assert stage.manager.unconfirmed() == (WORKER,)
    stage.step(forgotten=forget.number)
    assert stage.manager.unconfirmed() == ()
    with pytest.raises(Exception, match=r"step\.forgotten"):
        stage.step(forgotten=forget.number + 1)


def test_a_worker_that_comes_back_is_told_what_it_has_not_confirmed() -> None:
    stage = Stage()
    clear_at_once(stage.manager, None, unused_only=True)
    stage.manager.take_orders(WORKER)
    stage.manager.disconnect(WORKER, "first", 1)
    welcome = stage.manager.hello(stage.hello._replace(generation=1), 2)
    assert welcome.generation == 1
    assert welcome.forget is not None and welcome.forget.everything
    stage.step(forgotten=welcome.forget.number)
    stage.manager.disconnect(WORKER, "first", 3)
    assert stage.manager.hello(stage.hello._replace(generation=1), 4).forget is None
    # Another state of the same epoch: its inventory may be older than the Clear call.
    assert stage.manager.hello(stage.hello, 5).forget == welcome.forget


def test_a_worker_without_an_inventory_is_told_nothing() -> None:
    stage = Stage()
    stage.manager.hello(stage.hello._replace(capabilities=()), 0)
    clear_at_once(stage.manager, None, unused_only=True)
    assert stage.manager.take_orders(WORKER) == ()
    assert stage.manager.unconfirmed() == ()
    assert stage.manager.hello(stage.hello._replace(capabilities=()), 1).forget is None


def test_of_too_many_cleared_namespaces_everything_is_forgotten() -> None:
    scopes = ClearedScopes()
    for number in range(MAX_SCOPES):
        scopes.add(Namespace("model", salt=str(number)))
    found = scopes.since(MAX_SCOPES - 2)
    assert found is not None
    assert [name.salt for name in found.namespaces] == [str(MAX_SCOPES - 2), str(MAX_SCOPES - 1)]
    scopes.add(TENANT)
    assert scopes.since(0) == Forget(MAX_SCOPES + 1, everything=True)
    assert scopes.since(MAX_SCOPES + 1) is None
