"""A request and its progress: its tokens, how far they are computed and published, its pages.

Knows no queue, no budget, no other sequence and no clock; the scheduler moves it from state to state.

    WAITING -> ACQUIRING -> RUNNING -> FINISHED      ACQUIRING -> FETCHING -> RUNNING   the host tier brings pages
       ^           |            |                    RUNNING -> ADOPTING -> RUNNING     the cache service lost its state
       '-refused---'            '--> PREEMPTED -> WAITING   any state -> FINISHED       an abort

    0 ........ published_len ..... computed_len ..... launched_len ..... len(tokens)
    findable            KV proven          KV of the launch in flight      the last sampled token has no KV
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from session.words import NO_PAGE, GroupPages, Match, MissReason, Namespace, SequenceId, SnapshotSlot
from worker_service.core.errors import InvalidField

MAX_STOP_STRINGS = 64
MAX_STOP_TOKENS = 1024
MAX_LOGPROBS = 64
# What fits into an int32 and into an fp32 number: a launch carries the values of all its rows in arrays of these.
MAX_INT32 = (1 << 31) - 1
MAX_FP32 = 3.4028234663852886e38
# Beyond these a penalised score overflows fp32, or underflows to 0, for any logits.
MIN_PENALTY, MAX_PENALTY = 1e-3, 1e3
NO_MATCH = Match(0, 0, 0, "", MissReason.UNSPECIFIED)


class State(Enum):
    WAITING = "waiting"
    ACQUIRING = "acquiring"
    FETCHING = "fetching"
    RUNNING = "running"
    ADOPTING = "adopting"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters and stop conditions. Randomness is a function of the seed and the position only."""

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int | None = None
    include_stop_token_text: bool = False

    def validate(self) -> None:
        """Raise InvalidField for the first value out of its range. NaN fails every comparison, so it fails here.

        What passes can be put into the arrays of a launch: a launch is shared, so no row may make it fail.
        """
        self._require("max_tokens", self.max_tokens >= 1, "at least 1")
        self._require("temperature", 0.0 <= self.temperature <= MAX_FP32, "a finite number, 0 or more")
        self._require("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1")
        self._require("top_k", 0 <= self.top_k <= MAX_INT32, f"between 0 (off) and {MAX_INT32}")
        self._require("min_p", 0.0 <= self.min_p <= 1.0, "between 0 and 1")
        self._require(
            "repetition_penalty",
            MIN_PENALTY <= self.repetition_penalty <= MAX_PENALTY,
            f"between {MIN_PENALTY:g} and {MAX_PENALTY:g}",
        )
        self._require("seed", 0 <= self.seed < 1 << 64, "an unsigned 64-bit number")
        self._require("stop", len(self.stop) <= MAX_STOP_STRINGS, f"at most {MAX_STOP_STRINGS} strings")
        self._require("stop", all(self.stop), "without empty strings")
        few = len(self.stop_token_ids) <= MAX_STOP_TOKENS
        self._require("stop_token_ids", few, f"at most {MAX_STOP_TOKENS} token ids")
        self._require("stop_token_ids", all(0 <= token <= MAX_INT32 for token in self.stop_token_ids), "token ids")
        self._require("logprobs", 0 <= (self.logprobs or 0) <= MAX_LOGPROBS, f"between 0 and {MAX_LOGPROBS}")

    def _require(self, field: str, holds: bool, wanted: str) -> None:
        if not holds:
            raise InvalidField(field, f"must be {wanted}, not {getattr(self, field)!r}")


class Request(NamedTuple):
    """A generate request. `prompt` is packed int32; `arrival` is the caller's clock and only reported back.

    `bypass_cache`: reuse nothing of other requests, and leave nothing for them.
    """

    sequence_id: SequenceId
    namespace: Namespace
    prompt: bytes
    sampling: SamplingParams
    priority: int = 0
    arrival: float = 0.0
    bypass_cache: bool = False


class TokenLogprobs(NamedTuple):
    """Natural logs of the model's own probabilities: of the sampled token, and of the likeliest ones, best first."""

    sampled: float
    top: tuple[tuple[int, float], ...]


class Timing(NamedTuple):
    """Times of a finished request, in seconds from its arrival."""

    time_to_first_token_s: float
    queued_s: float
    end_to_end_s: float = 0.0


class Usage(NamedTuple):
    """Without a preemption cached + fetched + computed = prompt; recomputing after one counts on top.

    The last four are what the cache service knew of the prompt at its first admission; `miss_reason` is the protocol's
    number, 0 when the request was never admitted.
    """

    prompt_tokens: int
    cached_tokens: int
    fetched_tokens: int
    computed_tokens: int
    generated_tokens: int
    num_preemptions: int
    matched_tokens: int = 0
    usable_tokens: int = 0
    limiting_group: str = ""
    miss_reason: int = 0


class QueueOrder(NamedTuple):
    """Sort key of the queue: higher priority first, then earlier arrival. A preemption does not change it."""

    minus_priority: int
    number: int


class Sequence:
    """A request with its state. `lease` counts its leases, so that results of an earlier lease can be dropped."""

    __slots__ = (
        "cached_tokens",
        "computed_len",
        "computed_tokens",
        "fetched_tokens",
        "granted_len",
        "held_by",
        "held_pages",
        "in_prefill_until",
        "kept_len",
        "known_len",
        "launched_len",
        "lease",
        "leased",
        "leave",
        "match",
        "num_preemptions",
        "num_refused_extends",
        "num_rejected",
        "prompt_len",
        "published_len",
        "queue_order",
        "request",
        "restore",
        "rolling",
        "start_len",
        "state",
        "tables",
        "tokens",
        "working",
        "written_len",
    )

    def __init__(self, request: Request, queue_order: QueueOrder, num_groups: int) -> None:
        self.request = request
        self.queue_order = queue_order
        self.state = State.WAITING
        self.tokens = array("i")
        self.tokens.frombytes(request.prompt)
        self.prompt_len = len(self.tokens)
        self.tables: list[array[int]] = [array("i") for _ in range(num_groups)]
        self.lease = 0
        self.leased = False
        self.cached_tokens = self.fetched_tokens = self.computed_tokens = 0
        self.num_preemptions = 0
        self.num_rejected = 0  # steps with an acquire or an adopt of this sequence that ended their sessions
        self.match = NO_MATCH  # of the first grant
        self.kept_len = 0  # leading tokens that the cache service keeps while there is no lease
        self.held_by: Sequence | None = None
        self.held_pages = 0
        self.forget_lease()

    def forget_lease(self) -> None:
        """Resets what is computed to nothing; the tokens stay, generated ones included."""
        self.leased = False
        self.start_len = self.computed_len = self.launched_len = self.published_len = 0
        self.known_len = 0  # tokens that the manager's lease keeps
        self.in_prefill_until = 0
        self.written_len = 0  # how far any launch of the lease may have written, rejected tokens included
        self.granted_len = (
            0  # the length that was asked for and granted; a chunk beyond it would miss its snapshot slots
        )
        self.num_refused_extends = 0
        self.restore: tuple[SnapshotSlot, ...] = ()
        self.leave: tuple[SnapshotSlot, ...] = ()
        self.working: tuple[SnapshotSlot, ...] = ()
        self.rolling: tuple[SnapshotSlot, ...] = ()
        for table in self.tables:
            del table[:]

    @property
    def sequence_id(self) -> SequenceId:
        return self.request.sequence_id

    @property
    def namespace(self) -> Namespace:
        return self.request.namespace

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def in_flight(self) -> bool:
        return self.launched_len > self.computed_len

    @property
    def has_computed(self) -> bool:
        """Whether the present lease has computed something beyond its cached prefix."""
        return self.computed_len > self.start_len

    def rolling_boundary(self, page_tokens: int) -> int:
        """Returns the boundary whose state the rolling slots hold; 0 when decode crossed none, or a launch may have
        written a later one."""
        boundary = self.computed_len // page_tokens * page_tokens
        has_moved_on = self.written_len // page_tokens * page_tokens > boundary
        return 0 if not self.rolling or has_moved_on or boundary <= self.in_prefill_until else boundary

    def packed_tokens(self) -> bytes:
        return self.tokens.tobytes() if self.num_generated else self.request.prompt

    def usage(self) -> Usage:
        return Usage(
            self.prompt_len,
            self.cached_tokens,
            self.fetched_tokens,
            self.computed_tokens,
            self.num_generated,
            self.num_preemptions,
            self.match.matched_tokens,
            self.match.usable_tokens,
            self.match.limiting_group,
            self.match.miss_reason,
        )


def place_pages(tables: list[array[int]], pages: tuple[GroupPages, ...]) -> None:
    """Writes page ids into the tables; a gap before them is filled with NO_PAGE."""
    for group, first_page, page_ids in pages:
        table = tables[group]
        fresh = array("i")
        fresh.frombytes(page_ids)
        if first_page > len(table):
            table.extend(array("i", (NO_PAGE,)) * (first_page - len(table)))
        table[first_page : first_page + len(fresh)] = fresh
