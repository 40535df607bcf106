"""The storage that SGLang's hierarchical cache calls from threads of its own: host pools from and to the host tier.

    --enable-hierarchical-cache --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{
        "backend_name": "stemcache", "module_path": "adapters.sglang.storage", "class_name": "StemcacheStorage",
        "interface_v1": 1, "cache": "127.0.0.1:7400", "redis": "redis://127.0.0.1:6379/0"}'

A page that is missing or damaged ends what is loaded; SGLang computes the rest.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from adapters.sglang.identity import ENGINE, PAGE_HASHES, folder_digest
from adapters.sglang.settings import StorageSettings
from adapters.sglang.stored_pages import StoredPages
from adapters.weights import Refused
from session.words import GroupKind
from tier_client.client import TierClient
from tier_client.values import PageGroup, TierClientConfig, fingerprint_of

try:
    from sglang.srt.runtime_context import get_server_args as server_args
except ImportError:  # before 0.5.20
    from sglang.srt.server_args import get_global_server_args as server_args

# What SGLang itself reads of the configuration.
OF_SGLANG = ("backend_name", "module_path", "class_name", "interface_v1")


class StemcacheStorage(HiCacheStorage):
    """One for each rank. Ranks that split heads have pages of their own; those of latents are the same on all."""

    def __init__(self, storage_config: Any, options: Any = None) -> None:
        given = {name: value for name, value in (storage_config.extra_config or {}).items() if name not in OF_SGLANG}
        self._settings = StorageSettings.read(given)
        for name in ("pp_size", "attn_cp_size", "dcp_size"):
            if getattr(storage_config, name) != 1:
                raise Refused(f"{name} is {getattr(storage_config, name)}; must be 1")
        self._config = storage_config
        self._client: TierClient | None = None

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._close()
        page = mem_pool_host.get_dummy_flat_data_page()
        page_bytes, settings, config = page.numel() * page.element_size(), self._settings, self._config
        self._client = TierClient(
            TierClientConfig(
                cache_address=settings.cache,
                redis_url=settings.redis,
                engine=f"{ENGINE} {version('sglang')}",
                model=config.model_name or "",
                fingerprint=self._fingerprint(mem_pool_host, page_bytes),
                page_tokens=mem_pool_host.page_size,
                groups=(PageGroup("full", GroupKind.FULL, page_bytes),),
                call_timeout_s=settings.call_timeout_s,
                store_timeout_s=settings.store_timeout_s,
                pause_s=settings.pause_s,
                part_bytes=settings.host_part_kb << 10,
            )
        )
        self._pages = StoredPages(self._client, page_bytes)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        if str(host_pool_name) != "kv":
            raise Refused(f"the model has a pool {host_pool_name}; the storage serves models of full attention alone")
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    def _fingerprint(self, pool: Any, page_bytes: int) -> bytes:
        config, arguments = self._config, server_args()
        rank = "all" if config.is_mla_model else f"{config.tp_rank} of {config.tp_size}"
        return fingerprint_of(
            {
                "engine": f"{ENGINE} storage",
                "page_hashes": PAGE_HASHES,
                "weights": self._settings.model_digest or folder_digest(config.model_name or ""),
                "dtype": [arguments.dtype, arguments.quantization, pool.dtype],
                "layout": [pool.layout, pool.page_size, pool.layer_num, page_bytes],
                "rank": rank,
                "platform": [version("sglang"), torch.__version__],
            }
        )

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        return self._pages.num_present(_ids(keys)) if keys else 0

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        values = self._pages.read(_ids(keys)) if keys else []
        first_slots = host_indices[:: self.mem_pool_host.page_size].tolist()
        for slot, value in zip(first_slots, values, strict=False):
            page = torch.frombuffer(value, dtype=torch.uint8).view(self.mem_pool_host.dtype)
            self.mem_pool_host.set_from_flat_data_page(slot, page)
        return [row < len(values) for row in range(len(keys))]

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        first_slots = host_indices[:: self.mem_pool_host.page_size].tolist()
        return [self._set(keys, [self.mem_pool_host.get_data_page(slot) for slot in first_slots])] * len(keys)

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        return self.batch_get([key])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        values = self._pages.read(_ids(keys)) if keys else []
        found: list[torch.Tensor | None] = [
            torch.frombuffer(value, dtype=torch.uint8).view(self.mem_pool_host.dtype) for value in values
        ]
        return found + [None] * (len(keys) - len(found))

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self._set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        return self._set(keys, list(values))

    def _set(self, keys: list[str], pages: list[torch.Tensor]) -> bool:
        rows = [page.contiguous().view(torch.uint8).numpy() for page in pages]
        return self._pages.write(_ids(keys), [row.data for row in rows]) if keys else True

    def close(self) -> None:
        self._close()

    def _close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None


def _ids(keys: list[str]) -> list[bytes]:
    return [bytes.fromhex(key) for key in keys]
