"""The linker itself on two ranks, with the few names that it takes from SGLang in place of SGLang."""

from __future__ import annotations

import enum
import hashlib
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import pytest
import torch
import torch.distributed as dist

from tests.adapters.test_sglang_hybrid import PAGE_TOKENS, WINDOW, requests, slots, state, tokens
from tests.tier_client.conftest import common_stage, shared
from tests.tier_client.stage import Stage

__all__ = ["common_stage", "shared"]

T = TypeVar("T")
KEYS = [hashlib.sha256(f"linker {page}".encode()).hexdigest() for page in range(4)]


class PoolName(enum.StrEnum):
    KV = "kv"
    SWA = "swa"
    MAMBA = "mamba"


class PoolTransfer(NamedTuple):
    name: PoolName
    keys: list[str]
    device_indices: torch.Tensor | None = None


class LayerWiseLoadCounter:
    """Counts the layers of one load."""

    def __init__(self, num_layers: int) -> None:
        self.num_layers, self.layers, self.ended = num_layers, [], threading.Event()

    def update_producer(self) -> int:
        return 0

    def complete(self, index: int, layer: int) -> None:
        self.layers.append(layer)
        if len(self.layers) == self.num_layers:
            self.ended.set()

    def finish(self, index: int) -> bool:
        return self.ended.wait(30)

    def reset(self) -> None:
        self.layers.clear()


def module(monkeypatch: pytest.MonkeyPatch, name: str, **names: object) -> None:
    made = ModuleType(name)
    made.__dict__.update(names)
    monkeypatch.setitem(sys.modules, name, made)


@pytest.fixture
def linker_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    place = "sglang.srt.mem_cache"
    for name in ("sglang", "sglang.srt", place, f"{place}.unified_cache"):
        module(monkeypatch, name)
    module(monkeypatch, f"{place}.hicache_storage", PoolName=PoolName, PoolTransfer=PoolTransfer)
    names = {"LayerWiseLoadCounter": LayerWiseLoadCounter, "UnifiedCacheLinker": object}
    module(monkeypatch, f"{place}.unified_cache.unified_cache_linker", **names)
    monkeypatch.delitem(sys.modules, "adapters.sglang.linker", raising=False)
    found = importlib.import_module("adapters.sglang.linker")
    monkeypatch.setattr(found, "version", lambda _: "0.5.23")
    yield found
    del sys.modules["adapters.sglang.linker"]


class Rank:
    """`full` and `states`: SGLang's pools, as SGLang has them."""

    def __init__(self, module: Any, stage: Stage, folder: Path, group: Any) -> None:
        cache, of_requests = tokens(0), requests(0, register_layer_transfer_counter=lambda _: None)
        self.full, self.states = cache.full_kv_pool, of_requests.mamba_pool.mamba_cache.temporal
        params = SimpleNamespace(
            is_eagle=False,
            token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: cache),
            req_to_token_pool=of_requests,
            page_size=PAGE_TOKENS,
            swa_retain_window=WINDOW,
            attn_tp_cache_group=group,
        )
        arguments = SimpleNamespace(
            model_path=str(folder),
            served_model_name=stage.test,
            dtype="float32",
            kv_cache_dtype="auto",
            quantization=None,
            tp_size=2,
        )
        settings = {"cache": stage.cache.settings["listen"], "redis": stage.redis.url, "model_digest": "ab"}
        settings |= {"lookup_wait_s": 30.0, "call_timeout_s": 20.0, "store_timeout_s": 20.0}
        components = [SimpleNamespace(name=name) for name in ("FULL", "SWA", "MAMBA")]
        self.linker = module.StemcacheLinker(arguments, params, components=components, extra_config=settings)

    def save(self) -> bool:
        pages = PoolTransfer(PoolName.KV, KEYS, slots(1, 2, 3, 4))
        window, snapshot = (
            PoolTransfer(PoolName.SWA, KEYS[2:], slots(5, 6)),
            PoolTransfer(PoolName.MAMBA, KEYS[3:], state(2)),
        )
        self.linker.offload([pages, window, snapshot])
        while not self.linker.num_completed_offloads():
            threading.Event().wait(0.005)
        return bool(self.linker.pop_completed_offload())

    def lookup(self) -> list[int]:
        return list(self.linker.lookup("a", [PoolTransfer(name, KEYS) for name in PoolName]))

    def load(self) -> bool:
        pages = PoolTransfer(PoolName.KV, KEYS, slots(9, 10, 11, 12))
        window, snapshot = (
            PoolTransfer(PoolName.SWA, KEYS[2:], slots(7, 8)),
            PoolTransfer(PoolName.MAMBA, KEYS[3:], state(6)),
        )
        if not self.linker.load("a", [pages, window, snapshot]):
            return False
        return bool(self.linker.finish_layer_wise_loading(self.linker.start_layer_wise_loading()))


def test_two_ranks_load_together_or_not_at_all(linker_module: Any, shared: Stage, tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as threads:
        store = dist.HashStore()
        groups = list(threads.map(lambda rank: dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60)), range(2)))
        with pytest.MonkeyPatch.context() as patch:  # torch.distributed knows the ranks of its own groups alone
            patch.setattr(dist, "get_rank", lambda group: groups.index(group))
            ranks = [Rank(linker_module, shared, tmp_path, group) for group in groups]

        def both(call: Callable[[Rank], T]) -> list[T]:
            return list(threads.map(call, ranks, timeout=60))

        assert both(Rank.lookup) == [[], []]
        assert both(Rank.save) == [True, True]
        assert both(Rank.lookup) == [[], []], "asked before"
        both(lambda rank: rank.linker.cancel_queued_load("a"))
        assert both(Rank.lookup) == [[4], [4]]
        assert both(Rank.load) == [True, True]
        for rank in ranks:
            assert all(torch.equal(pool[slots(9, 10, 11, 12)], pool[slots(1, 2, 3, 4)]) for pool in rank.full.k_buffer)
            assert torch.equal(rank.states[:, 6], rank.states[:, 2])
        assert both(Rank.load) == [False, False], "taken once"
        assert both(Rank.lookup) == [[4], [4]]
        ranks[1].linker._reads.clear()
        assert both(Rank.load) == [False, False], "what one rank has lost is loaded by none"
        for rank in ranks:
            rank.linker.reset()
            rank.linker.close()
