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

from adapters.sglang.identity import ENGINE, check_config, fingerprint
from adapters.sglang.offloads import Offloads
from adapters.sglang.pool_pages import PoolPages
from adapters.sglang.reads import PageReads
from adapters.sglang.settings import Settings
from session.words import GroupKind
from tier_client.client import TierClient
from tier_client.values import PageGroup, TierClientConfig


class StemcacheLinker(UnifiedCacheLinker):
    """One for each rank; each rank's pages have a fingerprint of their own, and SGLang takes what all ranks found."""

    def __init__(
        self, server_args: Any, params: Any, *, components: Any, extra_config: Any = None, forward_stream: Any = None
    ) -> None:
        settings = Settings.read(extra_config or {})
        check_config(server_args, [component.name for component in components], params.is_eagle)
        pool, page_tokens = params.token_to_kv_pool_allocator.get_kvcache(), params.page_size
        self._pages = PoolPages(pool, page_tokens)
        group = params.attn_tp_cache_group or params.tp_cache_group
        rank = torch.distributed.get_rank(group) if group is not None else 0
        config = TierClientConfig(
            cache_address=settings.cache,
            redis_url=settings.redis,
            engine=f"{ENGINE} {version('sglang')}",
            model=server_args.served_model_name or server_args.model_path,
            fingerprint=fingerprint(server_args, self._pages, rank, settings.model_digest, _platform(self._pages)),
            page_tokens=page_tokens,
            groups=(PageGroup("full", GroupKind.FULL, self._pages.page_bytes),),
            call_timeout_s=settings.call_timeout_s,
            store_timeout_s=settings.store_timeout_s,
            pause_s=settings.pause_s,
            part_bytes=settings.host_part_kb << 10,
            num_connections=settings.read_threads,
        )
        self._client = TierClient(config)
        self._reads = PageReads(
            self._client,
            self._pages.page_bytes,
            settings.max_staged_mb << 20,
            settings.lookup_wait_s,
            settings.read_threads,
        )
        self._offloads = Offloads(self._client, self._pages, page_tokens, settings.max_waiting_offloads)
        self.pools = {PoolName.KV: pool}
        self.forward_stream = forward_stream
        self.layer_done_counter = LayerWiseLoadCounter(self._pages.num_layers)
        self._queued: dict[str, tuple[list[memoryview], torch.Tensor]] = {}
        self._loader = ThreadPoolExecutor(1, "stemcache-load")

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        return list(range(1, self._reads.verified(rid, _page_ids(transfers)) + 1))

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        pages = self._reads.take(rid, _page_ids(transfers))
        if pages is None:
            return False
        self._queued[rid] = pages, transfers[0].device_indices.clone()
        return True

    def start_layer_wise_loading(self) -> int:
        if not self._queued:
            return -1
        counter, queued = self.layer_done_counter, list(self._queued.values())
        self._queued.clear()
        index = counter.update_producer()
        # Their slots may be another request's until what is launched now has ended.
        ready = self.record_offload_ready() if self._pages.device.type == "cuda" else []
        self._loader.submit(self._load, index, queued, ready)
        return int(index)

    def _load(self, index: int, queued: list[tuple[list[memoryview], torch.Tensor]], ready: list[Any]) -> None:
        try:
            for event in ready:
                event.synchronize()
            stack = self._pages.staged([page for pages, _ in queued for page in pages])
            indices = torch.cat([slots for _, slots in queued])
            for layer in range(self._pages.num_layers):
                self._pages.write_layer(layer, indices, stack)
                if self._pages.device.type == "cuda":
                    torch.cuda.current_stream(self._pages.device).synchronize()
                self.layer_done_counter.complete(index, layer)
        except BaseException as error:  # whatever it was, the forward waits for these layers
            self.layer_done_counter.fail(index, error)

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return bool(self.layer_done_counter.finish(counter_index))

    def cancel_queued_load(self, rid: str) -> bool:
        self._reads.drop(rid)
        return self._queued.pop(rid, None) is not None

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        events = self.record_offload_ready() if self._pages.device.type == "cuda" else []

        def wait() -> None:
            for event in events:
                event.synchronize()

        self._offloads.add(_page_ids(transfers), transfers[0].device_indices.clone(), wait)
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


def _page_ids(transfers: list[PoolTransfer]) -> list[bytes]:
    (transfer,) = transfers
    return [bytes.fromhex(key) for key in transfer.keys]


def _platform(pages: PoolPages) -> list[str]:
    device = torch.cuda.get_device_name(pages.device) if pages.device.type == "cuda" else pages.device.type
    return [version("sglang"), torch.__version__, device]
