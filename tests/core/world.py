"""The stage of the manager's tests: a manager, its clock, its workers' sequences and host tiers."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cache_service.core.base.types import Connection, Event
from cache_service.core.cache_manager import CacheManager, ManagerConfig
from session.errors import FieldError
from session.messages import Grant
from session.words import (
    GroupKind,
    GroupSpec,
    Namespace,
    ReleaseReason,
    Transfer,
    TransferPages,
    TransferStatus,
    WorkerId,
)
from tests.core import audit
from tests.core.shadow import Value, extend_marks
from tests.core.snapshot import snapshot

if TYPE_CHECKING:
    from tests.core.session import Session

NS = Namespace("model")
FINGERPRINT = b"f" * 32
FINISHED, ABORTED, PREEMPTED = ReleaseReason.FINISHED, ReleaseReason.ABORTED, ReleaseReason.PREEMPTED
DONE, MISSING, FAILED = TransferStatus.DONE, TransferStatus.MISSING, TransferStatus.FAILED
CORRUPT = TransferStatus.CORRUPT


def full(num_pages: int, name: str = "full") -> GroupSpec:
    return GroupSpec(name, GroupKind.FULL, num_pages, 64)


def window(num_pages: int, window_tokens: int, name: str = "window") -> GroupSpec:
    return GroupSpec(name, GroupKind.WINDOW, num_pages, 64, window_tokens)


def state(num_pages: int, name: str = "state", interval: int = 0) -> GroupSpec:
    return GroupSpec(name, GroupKind.STATE, num_pages, 64, state_interval_tokens=interval)


def pack(tokens: Iterable[int]) -> bytes:
    return array("i", tokens).tobytes()


def ids(page_ids: bytes) -> list[int]:
    return list(array("I", page_ids))


def keys(part: TransferPages) -> list[bytes]:
    """The store's key of each page that the group moves; empty where it moves none."""
    hashes = [part.page_hashes[at : at + 32] for at in range(0, len(part.page_hashes), 32)]
    named = [f"{part.key_prefix}0:{page_hash.hex()}".encode() for page_hash in hashes]
    return [key if page else b"" for page, key in zip(ids(part.page_ids), named, strict=True)]


@dataclass(eq=False)
class Live:
    """One sequence as its worker sees it. `computed` has KV; `reported`, `known_len`: the manager was told."""

    id: int
    namespace: Namespace
    tokens: list[int]
    marks: list[int]
    prompt_len: int
    known_len: int
    tables: list[dict[int, int]]
    grant: Grant
    computed: int = 0
    reported: int = 0
    working: dict[int, int] = field(default_factory=dict)
    rolling: dict[int, int] = field(default_factory=dict)
    snapshots: dict[tuple[int, int], int] = field(default_factory=dict)
    restored: bool = False
    rolled: int = 0
    fetches: list[Transfer] = field(default_factory=list)  # whose acks are still to come
    priority: int = 0
    chunk: int = 0
    room: int = 0  # the length up to which launches may compute
    ended: bool = False
    adopted: bool = False
    bypass: bool = False

    @property
    def fetch(self) -> Transfer | None:
        return self.fetches[0] if self.fetches else None

    def table(self, group: int = 0) -> list[int]:
        rows = self.tables[group]
        return [rows.get(i, 0) for i in range(max(rows, default=-1) + 1)]

    def append(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        extend_marks(self.marks, self.namespace, tokens)


class World:
    """One manager, its clock, its workers and the host tiers they can reach."""

    def __init__(self, **config: Any) -> None:
        self.config = ManagerConfig(**config)
        self.now_ms = 1_000
        self.epochs = 0
        self.workers: dict[str, Session] = {}
        self.stores: dict[str, dict[bytes, Value]] = {}
        self.value_of_key: dict[bytes, Value] = {}
        self.events: list[Event] = []  # of pages; listeners hear of connections, too
        self.next_sequence = 0
        self.listeners: list[Callable[[Sequence[Event]], None]] = []
        self.new_manager()

    def new_manager(self) -> None:
        """What a restart of the cache service leaves: nothing."""
        self.epochs += 1
        self.manager = CacheManager(self.config, f"epoch-{self.epochs}")

    def snapshot(self) -> object:
        return snapshot(self.manager)

    def settle(self) -> None:
        """After each call: the books must balance; events and orders go where they belong."""
        audit.check(self.manager)
        events = self.manager.take_events()
        self.events += [event for event in events if not isinstance(event, Connection)]
        for listener in self.listeners:
            listener(events)
        for key in self.manager.tiers.take_deletes():
            for store in self.stores.values():
                store.pop(key, None)
        self.manager.tiers.take_touches()
        for worker in self.workers.values():
            if worker.connected:
                worker.take_orders()

    def unchanged(self, call: Callable[..., object], *args: Any) -> FieldError:
        """The call must fail with a FieldError and change nothing."""
        before = self.snapshot()
        try:
            call(*args)
        except FieldError as error:
            assert self.snapshot() == before, f"a failed call changed something: {error}"
            return error
        raise AssertionError("the call was expected to fail")

    def tick(self, ms: int = 1) -> None:
        self.now_ms += ms
        self.manager.tick(self.now_ms)
        self.settle()

    def tokens_cached(self, tokens: Sequence[int], namespace: Namespace = NS, worker: str = "w0") -> int:
        """Usable tokens of a prompt, as Match tells them."""
        (match,) = self.manager.match(namespace, pack(tokens), WorkerId(worker))
        return match.match.usable_tokens
