"""The linker that SGLang's unified radix cache calls: its pages come from and go to the host tier, in any process.

    --enable-unified-cache-external-linker --unified-cache-external-linker-backend dynamic
    --unified-cache-external-linker-config '{
        "linker": "StemcacheLinker", "linker_module_path": "adapters.sglang.linker",
        "linker_extra_config": {"cache": "127.0.0.1:7400", "redis": "redis://127.0.0.1:6379/0"}}'

A lookup counts pages whose bytes are here and verified, so a load never fails (SGLang aborts the requests of one that
does). While the cache service or Redis is away, lookups find nothing and offloads write nothing.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter, UnifiedCacheLinker

from adapters.sglang.device_pools import KV, MAMBA, DevicePool, device_pools
from adapters.sglang.identity import ENGINE, check_config, fingerprint
from adapters.sglang.loads import Load, Loads
from adapters.sglang.offloads import Offloads, Part
from adapters.sglang.ranks import least_of
from adapters.sglang.reads import PageReads
from adapters.sglang.settings import Settings
from tier_client.client import TierClient
from tier_client.values import TierClientConfig


class StemcacheLinker(UnifiedCacheLinker):
    """One for each rank, whose pages have a fingerprint of their own. What is found and loaded is the same on all."""

    def __init__(
        self, server_args: Any, params: Any, *, components: Any, extra_config: Any = None, forward_stream: Any = None
    ) -> None:
        settings, names = Settings.read(extra_config or {}), [component.name for component in components]
        check_config(server_args, params, names)
        cache, requests = params.token_to_kv_pool_allocator.get_kvcache(), params.req_to_token_pool
        self._pools = device_pools(cache, requests, names, params.page_size, params.swa_retain_window)
        self._device = self._pools[0].pages.device
        group = params.attn_tp_cache_group or params.tp_cache_group
        self._client = TierClient(_config(server_args, params, group, settings, self._pools))
        self._reads = PageReads(
            self._client, settings.max_staged_mb << 20, settings.lookup_wait_s, settings.read_threads, least_of(group)
        )
        pages = [pool.pages for pool in self._pools]
        self._offloads = Offloads(self._client, pages, settings.max_waiting_offloads)
        self._loads = Loads(self._pools)
        self.pools = {PoolName(pool.name): pool for pool in self._pools}
        self.forward_stream = forward_stream
        self.layer_done_counter = LayerWiseLoadCounter(self._loads.num_layers)
        if PoolName(MAMBA) in self.pools:
            # SGLang itself registers it with the pool of tokens alone.
            requests.register_layer_transfer_counter(self.layer_done_counter)
        self._queued: dict[str, list[Load]] = {}
        self._loader = ThreadPoolExecutor(1, "stemcache-load")

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        return self._reads.lengths(rid, _page_ids(transfers))

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        values = self._reads.take(rid, _page_ids(transfers))
        by_name = {str(transfer.name): transfer for transfer in transfers}
        if values is None or set(by_name) != {pool.name for pool in self._pools}:
            return False
        loads = []
        for group, pool in enumerate(self._pools):
            count, indices = len(by_name[pool.name].keys), by_name[pool.name].device_indices
            if len(values[group]) < count:
                return False
            # A window that begins within the prefix may be shorter than what was read for it.
            loads.append(Load(group, values[group][len(values[group]) - count :], indices.clone()))
        self._queued[rid] = loads
        return True

    def start_layer_wise_loading(self) -> int:
        if not self._queued:
            return -1
        counter, queued = self.layer_done_counter, [load for loads in self._queued.values() for load in loads]
        self._queued.clear()
        index = counter.update_producer()
        # Their slots may be another request's until what is launched now has ended.
        ready = self.record_offload_ready() if self._device.type == "cuda" else []
        self._loader.submit(self._load, index, queued, ready)
        return int(index)

    def _load(self, index: int, queued: list[Load], ready: list[Any]) -> None:
        try:
            for event in ready:
                event.synchronize()
            for layer in self._loads.layers(queued):
                if self._device.type == "cuda":
                    torch.cuda.current_stream(self._device).synchronize()
                self.layer_done_counter.complete(index, layer)
        except BaseException as error:  # whatever it was, the forward waits for these layers
            self.layer_done_counter.fail(index, error)

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return bool(self.layer_done_counter.finish(counter_index))

    def cancel_queued_load(self, rid: str) -> bool:
        self._reads.drop(rid)
        return self._queued.pop(rid, None) is not None

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        events = self.record_offload_ready() if self._device.type == "cuda" else []

        def wait() -> None:
            for event in events:
                event.synchronize()

        groups = {pool.name: group for group, pool in enumerate(self._pools)}
        parts = [Part(groups[str(one.name)], len(one.keys), one.device_indices.clone()) for one in transfers]
        self._offloads.add(_page_ids(transfers), parts, wait)
        return True

    def num_completed_offloads(self) -> int:
        return self._offloads.num_ended()

    def pop_completed_offload(self) -> bool:
        return self._offloads.pop_ended()

    def reset(self) -> None:
        self._stop_loads()
        self._offloads.drain()
        self.layer_done_counter.reset()

    def close(self) -> None:
        self._stop_loads()
        self._loader.shutdown()
        self._offloads.close()
        self._reads.close()
        self._client.close()

    def _stop_loads(self) -> None:
        self._queued.clear()
        self._reads.clear()
        ended = threading.Event()
        self._loader.submit(ended.set)
        ended.wait()


def _config(
    server_args: Any, params: Any, group: Any, settings: Settings, pools: tuple[DevicePool, ...]
) -> TierClientConfig:
    rank = torch.distributed.get_rank(group) if group is not None else 0
    device = pools[0].pages.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    platform = [version("sglang"), torch.__version__, name]
    return settings.client_config(
        engine=f"{ENGINE} {version('sglang')}",
        model=server_args.served_model_name or server_args.model_path,
        fingerprint=fingerprint(server_args, pools, rank, settings.model_digest, platform),
        page_tokens=params.page_size,
        groups=tuple(pool.group for pool in pools),
        num_connections=settings.read_threads + 1,  # offloads have a thread of their own
    )


def _page_ids(transfers: list[PoolTransfer]) -> list[bytes]:
    (tokens,) = [transfer for transfer in transfers if str(transfer.name) == KV]
    return [bytes.fromhex(key) for key in tokens.keys]
