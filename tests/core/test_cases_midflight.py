"""What a running sequence published serves its siblings, and nothing else does; ids as in docs/cases.md."""

from __future__ import annotations

from array import array

import pytest

from cache_service.core.base.types import Stored
from session.messages import Acquire, Publish, Release
from session.words import GroupSpec, ReleaseReason, SequenceId
from tests.core.driver import FakeWorker
from tests.core.oracle import Oracle
from tests.core.test_cases_pages import span, spare
from tests.core.world import ABORTED, NS, Live, World, full, pack, window


def make(groups: list[GroupSpec], page_tokens: int) -> FakeWorker:
    return FakeWorker(World(watch=True), groups, page_tokens)


@pytest.mark.parametrize(
    "groups", [[full(32)], [full(32), window(32, 4)], [window(32, 4)]], ids=["full", "both", "window"]
)
def test_case_20_an_unfinished_sequence_serves_its_sibling(groups: list[GroupSpec]) -> None:
    worker = make(groups, 1)
    first = worker.start(span(1, 8))
    worker.launch(first)
    assert worker.start(span(1, 8)).grant.usable_tokens == 0, "no completion report, no hit"
    worker.publish(first)
    assert worker.start(span(1, 8)).grant.usable_tokens == 7


@pytest.mark.parametrize(
    "groups", [[full(32)], [full(32), window(32, 4)], [window(32, 4)]], ids=["full", "both", "window"]
)
def test_case_21_several_tokens_accepted_at_once(groups: list[GroupSpec]) -> None:
    worker = make(groups, 1)
    first = worker.start([1, 2])
    worker.prefill(first)
    assert worker.extend(first, 6)
    first.append([3, 4, 5, 6])
    worker.launch(first, 3)
    worker.publish(first)
    assert worker.start(span(1, 6)).grant.usable_tokens == 5


@pytest.mark.parametrize("groups", [[full(16)], [full(16), window(16, 4)]], ids=["case 22", "case 23"])
def test_case_22_23_reserved_draft_slots_stay_private(groups: list[GroupSpec]) -> None:
    worker = make(groups, 2)
    first = worker.start([1, 2])
    worker.prefill(first)
    worker.sample(first, [3])
    assert worker.extend(first, 7)
    assert len(first.table()) == 4
    first.append([4, 5])
    worker.launch(first, 2)
    worker.publish(first)
    assert worker.start(span(1, 5)).grant.usable_tokens == 4
    assert worker.start(span(1, 6)).grant.usable_tokens == 4
    assert worker.world.tokens_cached(span(1, 9)) == 4


@pytest.mark.parametrize(("page", "cached"), [(64, 320), (16, 336)])
def test_case_24_r40_a_long_prompt_hits_while_the_first_decodes(page: int, cached: int) -> None:
    worker = make([full(100)], page)
    first = worker.start(span(1, 338))
    worker.prefill(first, 100)
    worker.decode(first, [900])
    second = worker.start(span(1, 338))
    assert second.grant.cached_tokens == cached
    assert 338 - cached == len(second.tokens) - second.computed


def chain(worker: FakeWorker) -> list[bytes]:
    stored = [e for e in worker.world.events if isinstance(e, Stored)]
    return [page_hash for event in stored for page_hash in event.page_hashes]


def test_case_25_r47_hashes_do_not_depend_on_how_pages_were_published() -> None:
    tokens = span(1, 24)
    chunked, whole = make([full(16)], 4), make([full(16)], 4)
    live = chunked.start(tokens[:10])
    chunked.prefill(live, 3)
    chunked.decode(live, tokens[10:])
    chunked.release(live)
    whole.run(tokens)
    assert chain(chunked) == chain(whole)
    assert len(chain(whole)) == 6


def test_case_25_r47_an_extension_goes_on_from_the_true_parent() -> None:
    """The second turn finds all its pages in the tree and adds one: same keys as a cold run of the whole."""
    warm, cold = make([full(16)], 4), make([full(16)], 4)
    warm.run(span(1, 8))
    warm.run(span(1, 9))
    warm.run(span(1, 13))
    cold.run(span(1, 13))
    assert chain(warm) == chain(cold)
    stored = [e for e in warm.world.events if isinstance(e, Stored)]
    assert [e.parent_hash for e in stored] == [b"", stored[0].page_hashes[-1]]


def test_case_26_r41_twins_in_one_step_both_compute_and_one_copy_stays() -> None:
    worker = make([full(8)], 4)
    oracle = Oracle(worker)
    acquires = [Acquire(SequenceId(i), NS, pack(span(1, 9))) for i in (71, 72)]
    reply = worker.step(acquires=acquires)
    first, second = (worker.taken(a, reply) for a in acquires)
    assert isinstance(first, Live) and isinstance(second, Live)
    assert first.grant.cached_tokens == second.grant.cached_tokens == 0
    assert not set(first.table()) & set(second.table())
    worker.prefill(first)
    worker.launch(second)
    worker.publish(second)
    assert second.table()[:2] == first.table()[:2]
    oracle.check()
    worker.release(first)
    worker.release(second)
    oracle.check()
    assert spare(worker) == 8
    assert len(oracle.resident[0]) == 2


def test_case_27_a_split_adds_one_page_and_gives_one_back() -> None:
    worker = make([full(8)], 2)
    oracle = Oracle(worker)
    first, second = worker.start([1, 2, 3, 4]), worker.start([1, 2, 5, 6])
    worker.prefill(first)
    worker.launch(second)
    reply = worker.publish(second)
    assert len(reply.remaps) == 1
    assert second.table()[0] == first.table()[0]
    assert len(oracle.resident[0]) == 3
    oracle.check()
    again = worker.start([1, 2, 3, 4])
    worker.prefill(again)
    assert len(oracle.resident[0]) == 3
    assert again.table() == first.table()
    oracle.check()


def test_r41_a_duplicate_in_the_middle_is_remapped_page_by_page() -> None:
    worker = make([full(16)], 2)
    first, second = worker.start(span(1, 8)), worker.start([*span(1, 6), 9, 9])
    worker.launch(first, 4)
    worker.publish(first)
    worker.launch(second, 2)
    worker.publish(second)
    assert second.table()[0] == first.table()[0] and second.table()[1] != first.table()[1]
    worker.launch(second, 6)
    worker.publish(second)
    assert second.table()[:2] == first.table()[:2]
    worker.launch(first, 4)
    worker.publish(first)
    assert first.table()[2] == second.table()[2]
    assert first.table()[3] != second.table()[3]


def test_r42_tokens_that_were_not_accepted_are_never_findable() -> None:
    worker = make([full(8)], 2)
    live = worker.start([1, 2])
    worker.prefill(live)
    assert worker.extend(live, 6)
    worker.step(publishes=[Publish(SequenceId(live.id), pack([3]), 2)])
    live.append([3])
    live.known_len = 3
    assert worker.world.tokens_cached([1, 2, 3, 4, 5, 6, 7]) == 2


def test_r41_published_pages_are_pinned_while_their_sequence_runs() -> None:
    worker = make([full(4)], 4)
    live = worker.start(span(1, 8))
    worker.prefill(live)
    worker.refused(span(50, 61))
    worker.run(span(50, 57))
    worker.run(span(60, 67))
    assert worker.world.tokens_cached(span(1, 9)) == 8
    worker.check_reads(live)


def test_e23_abort_at_every_chunk_boundary_leaves_only_written_pages() -> None:
    tokens = span(1, 20)
    for stop in range(0, 21, 3):
        for reported in {0, max(0, stop - 2), stop}:
            worker = make([full(8), window(12, 6)], 4)
            oracle = Oracle(worker)
            live = worker.start(tokens, chunk=20)
            if stop:
                worker.launch(live, min(stop, 20))
                if reported:
                    worker.publish(live, reported)
            worker.release(live, ABORTED)
            oracle.check()
            assert worker.world.tokens_cached([*tokens, 0]) == reported // 4 * 4
            again = worker.start([*tokens, 0])
            worker.prefill(again)


def test_r48_acquires_of_one_step_see_what_was_published_before_it() -> None:
    """Order of the acquires in a step changes neither hits nor anything else that they are told."""
    prompts = [span(1, 12), [*span(1, 8), 9, 9, 9, 9], span(1, 9)]
    told = []
    for order in ([0, 1, 2], [2, 1, 0]):
        worker = make([full(32)], 4)
        worker.run(span(1, 8))
        acquires = [Acquire(SequenceId(10 + i), NS, pack(prompts[i])) for i in order]
        reply = worker.step(acquires=acquires)
        told.append({g.sequence_id: (g.usable_tokens, g.match) for g in reply.grants})
    assert told[0] == told[1]
    assert len(told[0]) == 3


def test_acks_and_publishes_of_a_step_serve_its_acquires() -> None:
    """The order of a Step's fields: what it publishes, its own acquires may already use; what it releases, too."""
    worker = make([full(3)], 4)
    first = worker.start(span(1, 9))
    worker.launch(first)
    publish = worker.publish_of(first)
    acquire = Acquire(SequenceId(99), NS, pack(span(1, 12)))
    release = Release(SequenceId(first.id), ReleaseReason.FINISHED)
    reply = worker.step(publishes=[publish], releases=[release], acquires=[acquire])
    worker.forget(first)
    second = worker.taken(acquire, reply)
    assert isinstance(second, Live)
    assert second.grant.cached_tokens == 8


def test_multi_turn_history_hits_and_tokens_are_little_endian_int32() -> None:
    worker = make([full(16)], 4)
    worker.run([2**31 - 1, 0, 7, 2**24] * 2)
    assert worker.world.tokens_cached([2**31 - 1, 0, 7, 2**24] * 2 + [5]) == 8
    assert array("i", pack([1])).itemsize == 4
