"""The messages of a session and their items: Hello and Welcome, Step and StepReply. Values only.

protos/v1 explains each field; docs/protocol.md says how the messages play together.
"""

from __future__ import annotations

from typing import NamedTuple

from session.limits import SessionLimits
from session.words import (
    GroupPages,
    GroupSpec,
    HostTierKind,
    Match,
    Namespace,
    RefusalReason,
    ReleaseReason,
    SequenceId,
    StateSlot,
    TicketId,
    Transfer,
    TransferStatus,
    WorkerId,
)


class Hello(NamedTuple):
    """`generation`: Welcome's number of the state that the worker goes on from; 0 begins a new one.

    `started_ns`: when its process started, by which incarnations are ordered; 0: unknown.
    """

    worker_id: WorkerId
    endpoint: str
    incarnation: str
    fingerprint: bytes
    page_tokens: int
    groups: tuple[GroupSpec, ...]
    host_tier: HostTierKind = HostTierKind.NONE
    host_tier_id: str = ""
    num_ranks: int = 1
    model: str = ""  # of every namespace that the worker names; empty: of any
    generation: int = 0
    capabilities: tuple[str, ...] = ()
    started_ns: int = 0


class Forget(NamedTuple):
    """What Clear calls dropped: of these namespaces, or of all, the worker's inventory forgets what it has.

    `number` counts the Clear calls of an epoch; a Step confirms it.
    """

    number: int
    everything: bool
    namespaces: tuple[Namespace, ...] = ()


class Welcome(NamedTuple):
    """`epoch` and `generation` name a state of the cache service; `last_step_id` is the last step applied to it.

    `generation` is Hello's where the worker may go on; any other number names a state that holds nothing yet.
    `forget`: Clear calls of this epoch that the worker has not confirmed.
    """

    epoch: str
    generation: int
    last_step_id: int
    limits: SessionLimits
    capabilities: tuple[str, ...] = ()
    forget: Forget | None = None


class Acquire(NamedTuple):
    """`tokens` are those after the first `kept_tokens`, which the service kept from an earlier acquire or lease.

    `leave_at` are boundaries in tokens at which snapshots are wanted: other requests part from this one there.
    """

    sequence_id: SequenceId
    namespace: Namespace
    tokens: bytes
    reserve_pages: int = 0
    chunk_tokens: int = 0  # 0: the whole prompt in one launch
    priority: int = 0
    kept_tokens: int = 0
    bypass_cache: bool = False
    leave_at: tuple[int, ...] = ()


class Grant(NamedTuple):
    """A sequence may run on these pages; while there are `fetches` it waits for the acks of all of them instead.

    The rest is for STATE groups: `restore` are the snapshots to load before the first launch; `snapshots` (`leave`
    in the protocol) the slots in which the coming chunk stores the state at those boundaries; `working` each group's
    slot for the running state; `rolling` each group's slot for the state at the last boundary that decoding crossed.
    """

    sequence_id: SequenceId
    usable_tokens: int
    cached_tokens: int
    fetched_tokens: int
    tables: tuple[GroupPages, ...]
    match: Match
    fetches: tuple[Transfer, ...] = ()
    restore: tuple[StateSlot, ...] = ()
    snapshots: tuple[StateSlot, ...] = ()
    working: tuple[StateSlot, ...] = ()
    rolling: tuple[StateSlot, ...] = ()


class Refusal(NamedTuple):
    """The item was not applied; nothing changed. `field` names the offending input when `reason` is INVALID."""

    sequence_id: SequenceId
    reason: RefusalReason
    detail: str
    field: str = ""


class BadItem(NamedTuple):
    """What decoding makes of a malformed item of a Step. `field` is named from the item on, as "namespace.salt"."""

    sequence_id: SequenceId
    field: str
    reason: str


class Extend(NamedTuple):
    """Room for a length of `num_tokens`. `leave_at`: further boundaries in tokens, as in Acquire."""

    sequence_id: SequenceId
    num_tokens: int
    leave_at: tuple[int, ...] = ()


class Shrink(NamedTuple):
    """The sequence keeps pages for a length of `num_tokens`, and gives back those behind."""

    sequence_id: SequenceId
    num_tokens: int


class ExtendGrant(NamedTuple):
    sequence_id: SequenceId
    pages: tuple[GroupPages, ...]
    snapshots: tuple[StateSlot, ...] = ()


class Publish(NamedTuple):
    """`tokens`: accepted ones beyond those that the service knows; `computed_tokens` have KV that was written."""

    sequence_id: SequenceId
    tokens: bytes
    computed_tokens: int


class Remap(NamedTuple):
    """The sequence's tables show these pages from now on."""

    sequence_id: SequenceId
    pages: tuple[GroupPages, ...]


class Release(NamedTuple):
    """`rolling_tokens`, with FINISHED and PREEMPTED: the boundary whose state the rolling slots hold, whatever is
    still in flight; 0: none."""

    sequence_id: SequenceId
    reason: ReleaseReason
    rolling_tokens: int = 0


class Ack(NamedTuple):
    """`num_done` leading pages of a transfer arrived; `num_bytes` and `seconds` are for the measured rates."""

    ticket: TicketId
    num_done: int
    status: TransferStatus
    num_bytes: int = 0
    seconds: float = 0.0


class Rates(NamedTuple):
    """Measured by the worker; 0: unknown."""

    prefill_tokens_per_s: float = 0.0
    fetch_bytes_per_s: float = 0.0
    spill_bytes_per_s: float = 0.0


class Adopt(NamedTuple):
    """Take over the pages of a sequence that an earlier state of the cache service granted."""

    sequence_id: SequenceId
    namespace: Namespace
    tokens: bytes
    computed_tokens: int
    tables: tuple[GroupPages, ...]
    working: tuple[StateSlot, ...] = ()
    rolling: tuple[StateSlot, ...] = ()
    priority: int = 0
    bypass_cache: bool = False


class CachedRun(NamedTuple):
    """Consecutive pages of one path that hold their KV: `page_ids` has for each group a packed id for each page.

    It begins where `parent_run` ends, or, where that is 0, at token 0 of `namespace`, which is None otherwise.
    """

    run: int
    parent_run: int
    namespace: Namespace | None
    tokens: bytes
    page_ids: tuple[bytes, ...]


class BadRun(NamedTuple):
    """What decoding makes of a malformed run. `field` is named from the run on, as "page_ids[0]"."""

    run: int
    field: str
    reason: str


class Inventory(NamedTuple):
    """A slice of what the worker's pages hold; after the one that `is_complete` no run follows in this generation."""

    runs: tuple[CachedRun | BadRun, ...]
    is_complete: bool


class RunRefusal(NamedTuple):
    """The run was not applied; nothing changed. `field` names the offending input when `reason` is INVALID."""

    run: int
    reason: RefusalReason
    detail: str
    field: str = ""


class Step(NamedTuple):
    """Everything that one engine iteration wants; a bad item is refused alone.

    Applied in the order of the fields, shrinks between releases and adopts, the inventory between adopts and extends.
    `forgotten` is the number of the last Forget that was followed.
    """

    step_id: int
    acks: tuple[Ack, ...] = ()
    publishes: tuple[Publish | BadItem, ...] = ()
    releases: tuple[Release | BadItem, ...] = ()
    adopts: tuple[Adopt | BadItem, ...] = ()
    extends: tuple[Extend, ...] = ()
    acquires: tuple[Acquire | BadItem, ...] = ()
    rates: Rates | None = None
    inventory: Inventory | None = None
    forgotten: int = 0
    shrinks: tuple[Shrink, ...] = ()


class StepReply(NamedTuple):
    step_id: int
    grants: tuple[Grant, ...] = ()
    extends: tuple[ExtendGrant, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    remaps: tuple[Remap, ...] = ()
    free_pages: tuple[int, ...] = ()  # by group number; evictable ones are not among them
    run_refusals: tuple[RunRefusal, ...] = ()
