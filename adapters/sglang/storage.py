"""The storage that SGLang's hierarchical cache calls from threads of its own: host pools from and to the host tier.

    --enable-hierarchical-cache --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{
        "backend_name": "stemcache", "module_path": "adapters.sglang.storage", "class_name": "StemcacheStorage",
        "interface_v1": 1, "cache": "127.0.0.1:7400", "redis": "redis://127.0.0.1:6379/0"}'

Each pool (keys and values, an index, windows, recurrent states) has pages of its own under its own rule. A page
that is missing or damaged ends what is loaded; SGLang computes the rest.
"""

from __future__ import annotations

import logging
from importlib.metadata import version
from typing import Any

import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from adapters.sglang.host_pools import HostPool, host_group, page_ids
from adapters.sglang.identity import ENGINE, PAGE_HASHES, folder_digest
from adapters.sglang.pool_hits import pool_hits
from adapters.sglang.settings import StorageSettings
from adapters.sglang.stored_pages import StoredPages
from adapters.weights import Refused
from tier_client.client import TierClient
from tier_client.values import PageGroup, TierClientConfig, fingerprint_of

try:
    from sglang.srt.runtime_context import get_server_args as server_args
except ImportError:  # before 0.5.20
    from sglang.srt.server_args import get_global_server_args as server_args

try:
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolTransferResult
except ImportError:  # before the interface's second version, which alone names them
    PoolHitPolicy = PoolTransferResult = None

# What SGLang itself reads of the configuration.
OF_SGLANG = ("backend_name", "module_path", "class_name", "interface_v1")
KV = "kv"
# Pools of latents, the same on all ranks; SGLang has the first rank write them.
OF_LATENTS = (KV, "indexer")

_log = logging.getLogger(__name__)


def window_tokens() -> int | None:
    """Returns the sliding window of the model that SGLang serves."""
    found: int | None = ModelConfig.from_server_args(server_args()).sliding_window_size
    return found


class StemcacheStorage(HiCacheStorage):
    """One for each rank. Ranks that split heads have pages of their own; those of latents are the same on all."""

    def __init__(self, storage_config: Any, options: Any = None) -> None:
        given = {name: value for name, value in (storage_config.extra_config or {}).items() if name not in OF_SGLANG}
        self._settings = StorageSettings.read(given)
        for name in ("pp_size", "attn_cp_size", "dcp_size"):
            if getattr(storage_config, name, 1) != 1:
                raise Refused(f"{name} is {getattr(storage_config, name)}; must be 1")
        self._config = storage_config
        self._pools: dict[str, HostPool] = {}

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._register(KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = str(host_pool_name)
        if name != KV or KV not in self._pools:
            self._register(name, host_pool)

    def _register(self, name: str, pool: Any) -> None:
        group = host_group(name, pool, window_tokens)
        if name in self._pools:
            self._pools.pop(name).stored.close()
        self._pools[name] = HostPool(pool, StoredPages(TierClient(self._client_config(group, pool))))

    def _client_config(self, group: PageGroup, pool: Any) -> TierClientConfig:
        return self._settings.client_config(
            engine=f"{ENGINE} {version('sglang')}",
            model=self._config.model_name or "",
            fingerprint=self._fingerprint(group, pool),
            page_tokens=self.mem_pool_host.page_size,
            groups=(group,),
        )

    def _fingerprint(self, group: PageGroup, pool: Any) -> bytes:
        config, arguments = self._config, server_args()
        is_same = config.is_mla_model and group.name in OF_LATENTS
        return fingerprint_of(
            {
                "engine": f"{ENGINE} storage",
                "page_hashes": PAGE_HASHES,
                "weights": self._settings.model_digest or folder_digest(config.model_name or ""),
                "dtype": [arguments.dtype, arguments.quantization, pool.dtype],
                "layout": [type(pool).__name__, pool.layout, self.mem_pool_host.page_size, group.page_bytes],
                "rank": "all" if is_same else f"{config.tp_rank} of {config.tp_size}",
                "platform": [version("sglang"), torch.__version__],
            }
        )

    # The first version: keys and values alone.

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        return self._pools[KV].stored.num_present(page_ids(keys))

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        return self._pools[KV].read(keys, host_indices)

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        return self._pools[KV].write(keys, host_indices)

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        return self.batch_get([key])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        return self._pools[KV].values(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self._pools[KV].keep([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        return self._pools[KV].keep(keys, list(values))

    # The second version: any pools.

    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        """Returns where a prefix can end for all these pools; with windows or states the last such page alone."""
        transfers = {str(transfer.name): transfer for transfer in pool_transfers or [] if str(transfer.name) != KV}
        for name, transfer in transfers.items():
            if not self._serves(name, transfer):
                return PoolTransferResult.empty()
        found = pool_hits(KV, {name: self._pools[name].stored for name in (KV, *transfers)}, page_ids(keys))
        is_sparse = any(one.hit_policy == PoolHitPolicy.TRAILING_PAGES for one in transfers.values())
        ends = range(found.usable if is_sparse and found.usable else 1, found.usable + 1)
        return PoolTransferResult(found.usable, found.by_pool, list(ends))

    def _serves(self, name: str, transfer: Any) -> bool:
        """Returns whether the pool's rule gives SGLang all that it asks for."""
        pool = self._pools.get(name)
        is_trailing = transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES
        if pool is None or transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS or is_trailing == pool.is_all:
            _log.warning("the pool %s is not found by %s", name, transfer.hit_policy)
            return False
        if is_trailing and len(transfer.keys or ()) > pool.reach_pages(self.mem_pool_host.page_size):
            _log.warning("the pool %s is asked for %d pages, more than its window", name, len(transfer.keys))
            return False
        return True

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[Any, list[bool]]:
        return {one.name: self._pools[str(one.name)].read(one.keys or [], one.host_indices) for one in transfers}

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[Any, list[bool]]:
        return {one.name: self._pools[str(one.name)].write(one.keys or [], one.host_indices) for one in transfers}

    def close(self) -> None:
        for pool in self._pools.values():
            pool.stored.close()
        self._pools.clear()
