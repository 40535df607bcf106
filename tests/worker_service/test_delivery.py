"""When readers are shown their tokens: a first one at once, further ones as often as many streams allow."""

from __future__ import annotations

from collections.abc import Sequence

from session.words import Namespace, SequenceId
from tests.worker_service.engine_harness import Letters
from tests.worker_service.scheduler_machine import full_group, packed
from worker_service.core.batch import build_batch
from worker_service.core.launches import Launch, Output
from worker_service.core.sampling_params import SamplingParams
from worker_service.core.scheduler import Scheduler
from worker_service.core.scheduler_config import SchedulerConfig
from worker_service.core.sequence import Request
from worker_service.delivery import MESSAGES_PER_S, UNPACED_STREAMS, Delivery
from worker_service.launch.launcher import NewTokens
from worker_service.launch.row_faults import RowResults
from worker_service.observer import Observer
from worker_service.output_stream import OutputStream

GROUPS = (full_group(64),)


class Readers:
    """Streams, each with a text of one letter a token."""

    def __init__(self, count: int, stop: tuple[str, ...] = ()) -> None:
        scheduler = Scheduler(SchedulerConfig(4, GROUPS, max_model_len=100, vocab_size=26))
        self.delivery = Delivery(scheduler, Observer())
        self.streams = []
        for number in range(1, count + 1):
            sampling = SamplingParams(max_tokens=90, stop=stop)
            scheduler.add(Request(SequenceId(number), Namespace("m"), packed([1]), sampling))
            self.streams.append(OutputStream(SequenceId(number), Letters(), sampling, 0.0))
            self.delivery.add(self.streams[-1])

    def launch(self, now_s: float, token: int = 0, numbers: Sequence[int] = ()) -> bool:
        """A token for each of these streams, or for all."""
        ids = numbers or range(1, len(self.streams) + 1)
        outputs = tuple(Output(SequenceId(number), (token,)) for number in ids)
        batch = build_batch([], 0, GROUPS, 4)
        results = RowResults((), (), {}, None)
        return self.delivery.deliver(Given(Launch(1, (), batch), results, now_s, outputs))

    def shown(self) -> int:
        """How many readers have something to read; they do not read it."""
        return sum(stream._news.is_set() for stream in self.streams)

    def read(self) -> None:
        for stream in self.streams:
            stream._news.clear()


class Given(NewTokens):
    def logprobs(self) -> dict[SequenceId, None]:
        return {output.sequence_id: None for output in self.outputs}


def test_few_streams_see_each_token() -> None:
    readers = Readers(UNPACED_STREAMS)
    for launch in range(3):
        readers.launch(1.0 + launch * 0.005)
        assert readers.shown() == UNPACED_STREAMS
        readers.read()


def test_many_streams_see_their_first_token_at_once_and_the_others_together() -> None:
    readers = Readers(UNPACED_STREAMS + 100)
    pause_s = 100 / MESSAGES_PER_S
    readers.launch(1.0)
    assert readers.shown() == UNPACED_STREAMS + 100
    readers.read()
    readers.launch(1.0 + pause_s * 0.6)
    assert readers.shown() == 0
    readers.launch(1.0 + pause_s * 1.1)
    assert readers.shown() == UNPACED_STREAMS + 100


def test_a_stream_that_has_no_row_any_more_is_shown_its_tokens_by_the_launches_of_others() -> None:
    readers = Readers(UNPACED_STREAMS + 100)
    readers.launch(1.0)
    readers.launch(1.001, numbers=[1])
    readers.read()
    readers.launch(2.0, numbers=[2])
    assert readers.shown() == 2


def test_when_nothing_runs_everything_is_shown() -> None:
    readers = Readers(UNPACED_STREAMS + 100)
    readers.launch(1.0)
    readers.read()
    readers.launch(1.001)
    assert readers.shown() == 0
    readers.delivery.show_due(1.002, everything=True)
    assert readers.shown() == UNPACED_STREAMS + 100


async def test_tokens_that_were_merged_are_one_piece_with_all_their_text() -> None:
    readers = Readers(UNPACED_STREAMS + 100)
    for token in range(3):
        readers.launch(1.0, token)
    piece = await readers.streams[0].next_piece()
    assert (piece.token_ids, piece.text) == ([0, 1, 2], "abc")


def test_a_stop_string_ends_its_stream_though_nothing_is_shown_yet() -> None:
    readers = Readers(UNPACED_STREAMS + 100, stop=("bb",))
    assert not readers.launch(1.0, token=0)
    assert not readers.launch(1.0, token=1, numbers=[7])
    assert readers.launch(1.0, token=1, numbers=[7])
    assert readers.delivery.num_unfinished == UNPACED_STREAMS + 99
    assert readers.streams[6].is_finished
