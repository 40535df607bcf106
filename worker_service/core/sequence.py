"""A request and its progress: its tokens, how far they are computed and published, its pages.

The scheduler moves it from state to state.

    WAITING -> ACQUIRING -> RUNNING -> FINISHED      ACQUIRING -> FETCHING -> RUNNING   the host tier brings pages
       ^           |            |                    RUNNING -> ADOPTING -> RUNNING     the cache service lost its state
       '-refused---'            '--> PREEMPTED -> WAITING   any state -> FINISHED       an abort

    0 ........ published_len ..... computed_len ..... launched_len ..... planned_len
    findable            KV proven          KV of launches in flight       the last sampled token has no KV
"""

from __future__ import annotations

from array import array
from enum import Enum
from typing import NamedTuple

from session.limits import MAX_SNAPSHOT_BOUNDARIES
from session.words import NO_PAGE, GroupPages, Match, MissReason, Namespace, SequenceId, StateSlot
from worker_service.core.sampling_params import SamplingParams

# Of a sequence whose tokens the device does not count.
NO_PENALTY_SLOT = -1
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


class Request(NamedTuple):
    """A generate request. `prompt` is packed int32.

    `bypass_cache`: reuse nothing of other requests, and leave nothing for them.
    """

    sequence_id: SequenceId
    namespace: Namespace
    prompt: bytes
    sampling: SamplingParams
    priority: int = 0
    bypass_cache: bool = False


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
    """A request with its state. `lease_number` counts its leases, so that results of an earlier one can be dropped."""

    __slots__ = (
        "branches",
        "cached_tokens",
        "computed_len",
        "computed_tokens",
        "counted_len",
        "end_len",
        "fetched_tokens",
        "granted_len",
        "has_lease",
        "held_by",
        "held_pages",
        "in_prefill_until",
        "kept_prompt_len",
        "launched_len",
        "lease_number",
        "leased_len",
        "match",
        "num_pending",
        "num_preemptions",
        "num_refused_extends",
        "num_rejected",
        "penalty_slot",
        "prompt_len",
        "published_len",
        "queue_order",
        "request",
        "restore",
        "rolling",
        "sample_index",
        "snapshots",
        "start_len",
        "state",
        "tables",
        "tokens",
        "working",
        "written_len",
        "written_snapshots",
    )

    def __init__(self, request: Request, queue_order: QueueOrder, num_groups: int) -> None:
        self.request = request
        self.queue_order = queue_order
        self.state = State.WAITING
        self.tokens = array("i")
        self.tokens.frombytes(request.prompt)
        self.prompt_len = len(self.tokens)
        self.end_len = self.prompt_len + request.sampling.max_tokens  # its most tokens
        self.tables: list[array[int]] = [array("i") for _ in range(num_groups)]
        self.lease_number = 0
        self.has_lease = False
        self.cached_tokens = self.fetched_tokens = self.computed_tokens = 0
        self.num_preemptions = 0
        self.num_rejected = 0  # steps with an acquire or an adopt of this sequence that ended their sessions
        self.match = NO_MATCH  # of the first grant
        self.kept_prompt_len = 0  # leading tokens that the cache service keeps while there is no lease
        self.held_by: Sequence | None = None
        self.held_pages = 0
        self.branches: set[int] = set()  # boundaries in tokens where requests that wait for it part from it
        self.forget_lease()

    def forget_lease(self) -> None:
        """Resets what is computed to nothing; the tokens stay, generated ones included."""
        self.has_lease = False
        self.start_len = self.computed_len = self.launched_len = self.published_len = 0
        self.leased_len = 0  # tokens that the cache service has of the lease
        self.in_prefill_until = 0
        self.num_pending = 0  # tokens that launches in flight sample: behind `tokens`, on the device only
        self.sample_index = 0  # which of the sampled rows of the last launch the pending token is
        self.written_len = 0  # how far any launch of the lease may have written, rejected tokens included
        # The length that was asked for and granted; a chunk beyond it would miss its snapshot slots.
        self.granted_len = 0
        self.branches.clear()
        self.num_refused_extends = 0
        self.penalty_slot = NO_PENALTY_SLOT
        # Tokens counted in the slot by the launches so far; -1: none, the slot was another sequence's.
        self.counted_len = -1
        self.restore: tuple[StateSlot, ...] = ()
        self.snapshots: tuple[StateSlot, ...] = ()
        self.written_snapshots: tuple[StateSlot, ...] = ()  # those that a launch has written since the last publish
        self.working: tuple[StateSlot, ...] = ()
        self.rolling: tuple[StateSlot, ...] = ()
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
    def planned_len(self) -> int:
        """Returns the length in tokens once the launches in flight have ended."""
        return len(self.tokens) + self.num_pending

    @property
    def in_flight(self) -> bool:
        return self.launched_len > self.computed_len

    @property
    def has_computed(self) -> bool:
        """Returns whether the present lease has computed something beyond its cached prefix."""
        return self.computed_len > self.start_len

    def rolling_boundary(self, page_tokens: int) -> int:
        """Returns the boundary whose state the rolling slots hold; 0 when decode crossed none, or a launch may have
        written a later one."""
        boundary = self.computed_len // page_tokens * page_tokens
        has_moved_on = self.written_len // page_tokens * page_tokens > boundary
        return 0 if not self.rolling or has_moved_on or boundary <= self.in_prefill_until else boundary

    def leave_at(self) -> tuple[int, ...]:
        """Returns the branches that no launch can have passed, as an acquire or an extend names them."""
        if not self.branches:
            return ()
        return tuple(
            sorted(boundary for boundary in self.branches if boundary > self.granted_len)[:MAX_SNAPSHOT_BOUNDARIES]
        )

    def drop_pages(self, num_pages: int) -> None:
        """Keeps the first `num_pages` of each block table."""
        for table in self.tables:
            del table[num_pages:]

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
