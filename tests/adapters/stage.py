"""An engine's scheduler and workers around both sides of the connector, with real tensors and a tier in a dict."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Any

import torch

from adapters.vllm.layout import GroupLayout, Layout
from adapters.vllm.metadata import StepOrders, StepReports
from adapters.vllm.page_copies import PageCopies
from adapters.vllm.saving import BoundaryState
from adapters.vllm.scheduler_side import Scheduled, SchedulerSide
from adapters.vllm.worker_side import Results, WorkerSide
from session.words import GroupKind
from tests.adapters.dict_tier import DictTier
from tier_client.calls import HostTierCalls
from tier_client.page_store import PageStore

PAGE_TOKENS = 4
NUM_BLOCKS = 32
PAUSE_S = 2.0
FULL = GroupLayout(GroupKind.FULL, 0, ("full.0", "full.1"), (32, 32))
LATENT = FULL._replace(replicated=True)
STATE = GroupLayout(GroupKind.STATE, 0, ("state.0",), (96,))
WINDOW = GroupLayout(GroupKind.WINDOW, 2 * PAGE_TOKENS + 1, ("window.0",), (64,))


def layout(*groups: GroupLayout) -> Layout:
    return Layout("test", PAGE_TOKENS, NUM_BLOCKS, groups or (FULL,))


def block_hashes(tokens: Sequence[int], salt: str | None = None) -> list[bytes]:
    """Chained, as vLLM's are."""
    chained, found = (salt or "").encode(), []
    for end in range(PAGE_TOKENS, len(tokens) + 1, PAGE_TOKENS):
        chained = hashlib.sha256(chained + repr(tokens[end - PAGE_TOKENS : end]).encode()).digest()
        found.append(chained)
    return found


@dataclass
class FakeRequest:
    request_id: str
    tokens: list[int]
    cache_salt: str | None = None
    lora_request: Any = None
    skip_reading_prefix_cache: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def block_hashes(self) -> list[bytes]:
        return block_hashes(self.tokens, self.cache_salt)


class ByHand(Executor):
    """Calls wait until the test runs them."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.waiting.append((future, lambda: fn(*args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self.waiting.clear()

    def run(self) -> None:
        while self.waiting:
            future, call = self.waiting.pop(0)
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)


def caches(spec: Layout) -> dict[str, Any]:
    """Tensors of [blocks, heads, tokens, channels], and two in a layer of states; groups have blocks of their own here.

    What lies between the blocks of a state is nobody's.
    """
    sizes = {name: size for group in spec.groups for name, size in zip(group.layers, group.layer_bytes, strict=True)}
    held: dict[str, Any] = {name: torch.zeros((NUM_BLOCKS, 2, PAGE_TOKENS, size // 32)) for name, size in sizes.items()}
    padded = torch.zeros((NUM_BLOCKS, 40))
    states = [padded[:, :8].unflatten(1, (2, 4)), padded[:, 8:24].unflatten(1, (2, 2, 4))]
    return {**held, **{name: states for name in held if name.startswith("state")}}


def tensors(cache: Any) -> list[torch.Tensor]:
    """Of one layer."""
    return cache if isinstance(cache, list) else [cache]


@dataclass
class Stage:
    """`clock`: the time that the scheduler's side sees. `index` and `stores`, one for each rank: instead of a dict."""

    spec: Layout
    num_ranks: int = 1
    max_staged_bytes: int = 1 << 20
    tier: DictTier | None = None
    thread: ByHand = field(default_factory=ByHand)
    clock: float = 0.0
    index: HostTierCalls | None = None
    stores: Sequence[PageStore] = ()

    def __post_init__(self) -> None:
        self.tier = self.tier or DictTier(self.spec, self.num_ranks)
        self.scheduler = SchedulerSide(
            self.index or self.tier,
            self.thread,
            self.spec,
            self.num_ranks,
            timeout_s=1.0,
            inline_wait_s=0.0,
            pause_s=PAUSE_S,
            now_s=lambda: self.clock,
        )
        self.caches = [caches(self.spec) for _ in range(self.num_ranks)]
        self.workers = [
            WorkerSide(
                self.stores[rank] if self.stores else self.tier,
                PageCopies(self.spec, held),
                self.spec,
                rank,
                max_staged_bytes=self.max_staged_bytes,
                load_threads=1,
                save_threads=1,
            )
            for rank, held in enumerate(self.caches)
        ]

    def close(self) -> None:
        self.scheduler.close()
        for worker in self.workers:
            worker.close()

    def fill(self, request: FakeRequest, tables: Sequence[Sequence[int]], first: int, end: int) -> None:
        """The forward pass of these pages: a page's content is its block hash's first byte, plus the rank."""
        for rank, held in enumerate(self.caches):
            for group, table in zip(self.spec.groups, tables, strict=True):
                for page in range(first, end):
                    if page < len(table) and table[page]:
                        for tensor in (one for name in group.layers for one in tensors(held[name])):
                            tensor[table[page]] = request.block_hashes[page][0] + rank

    def contents(self, group: int, block: int, rank: int = 0) -> set[float]:
        return {
            value
            for name in self.spec.groups[group].layers
            for tensor in tensors(self.caches[rank][name])
            for value in tensor[block].flatten().tolist()
        }

    def step(
        self,
        scheduled: Sequence[Scheduled] = (),
        new_blocks: Sequence[int] = (),
        forward: Callable[[], None] | None = None,
    ) -> list[Results]:
        """One step of the engine: orders, each worker's calls in vLLM's order, reports; then the tier answers."""
        orders = self.scheduler.step(scheduled, new_blocks)
        for worker in self.workers:
            worker.before_forward(orders)
        if forward is not None:
            forward()
        for worker in self.workers:
            worker.start_loads(orders)
            worker.after_forward(orders)
        results = self._settle(orders)
        self.thread.run()
        return results

    def _settle(self, orders: StepOrders) -> list[Results]:
        """Waits for what the orders have begun."""
        loads, writes = len(orders.loads), len(orders.writes)
        results = []
        for worker in self.workers:
            reports = StepReports()
            while len(reports.loads) < loads or len(reports.writes) < writes:
                reports = reports.merge(worker.take_reports())
            results.append(worker.take_results())
            self.scheduler.reported(reports)
        return results

    def matched(self, request: FakeRequest, computed: int = 0) -> int | None:
        """After the tier has answered."""
        self.scheduler.matched_tokens(request, computed)
        self.thread.run()
        return self.scheduler.matched_tokens(request, computed)

    def compute(self, request: FakeRequest, tables: Sequence[Sequence[int]], computed: int = 0) -> None:
        """Compute the whole prompt in one step, and let what it completes be saved."""
        self.scheduler.matched_tokens(request, computed)
        self.thread.run()
        self.scheduler.allocated(request, tables, 0)
        pages = len(request.block_hashes)
        states = [
            BoundaryState(number, tables[number][pages - 1], pages * PAGE_TOKENS)
            for number, group in enumerate(self.spec.groups)
            if group.kind is GroupKind.STATE
        ]
        whole = Scheduled(request.request_id, computed, request.num_tokens, tables, states)
        self.step([whole], forward=lambda: self.fill(request, tables, computed // PAGE_TOKENS, pages))
        self.step()
        self.step()
