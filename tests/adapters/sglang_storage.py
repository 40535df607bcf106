"""Run by the interpreter that SGLang is installed in: its own host pools through the storage, on a CPU.

    python -m tests.adapters.sglang_storage MODEL CACHE_ADDRESS REDIS_URL

Prints one JSON object of what was found for each layout and interface.
"""

from __future__ import annotations

import hashlib
import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

from adapters.sglang import storage

PAGE_TOKENS, PAGES = 16, 5


def host_pool(layout: str) -> Any:
    sizes = {"size": 256, "page_size": PAGE_TOKENS, "head_num": 2, "head_dim": 32, "layer_num": 4}
    device = MHATokenToKVPool(**sizes, dtype=torch.float32, device="cpu", enable_memory_saver=False)
    info = device._mha_buffer_info()
    pool = MHATokenToKVPoolHost(
        info, 2.0, 0, PAGE_TOKENS, layout, pin_memory=False, device="cpu", device_capacity_tokens=256,
        start_layer=0, end_layer=4,
    )  # fmt: skip
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape))
    return pool


def backend(model: str, cache: str, redis: str, pool: Any, **changes: Any) -> Any:
    settings = {"call_timeout_s": 20.0, "store_timeout_s": 20.0, "cache": cache, "redis": redis}
    names = {"backend_name": "stemcache", "module_path": "adapters.sglang.storage", "class_name": "StemcacheStorage"}
    config = HiCacheStorageConfig(
        tp_rank=changes.get("rank", 0), tp_size=2, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1,
        is_mla_model=False, enable_storage_metrics=False, is_page_first_layout=True, model_name=model,
        extra_config={**names, "interface_v1": 1, **settings},
    )  # fmt: skip
    made = StorageBackendFactory.create_backend("dynamic", config, pool)
    made.register_mem_pool_host(pool)
    return made


def slots(*pages: int) -> torch.Tensor:
    return (torch.tensor(pages)[:, None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS)).flatten()


def equal(one: Any, pages: tuple[int, ...], other: Any, others: tuple[int, ...]) -> bool:
    pairs = zip(pages, others, strict=True)
    size = PAGE_TOKENS
    return all(torch.equal(one.get_data_page(a * size), other.get_data_page(b * size)) for a, b in pairs)


def round_trip(layout: str, model: str, cache: str, redis: str) -> dict[str, object]:
    source, target = host_pool(layout), host_pool(layout)
    keys = [hashlib.sha256(f"{layout} {page}".encode()).hexdigest() for page in range(PAGES)]
    first, second = backend(model, cache, redis, source), backend(model, cache, redis, target)
    found: dict[str, object] = {"before": first.batch_exists(keys)}
    found["written"] = first.batch_set_v1(keys, slots(1, 2, 3, 4, 5))
    found["present"] = second.batch_exists([*keys, "00" * 32])
    found["read"] = second.batch_get_v1(keys, slots(9, 8, 7, 6, 2))
    found["same"] = equal(source, (1, 2, 3, 4, 5), target, (9, 8, 7, 6, 2))
    values = second.batch_get(keys[:2])
    found["older"] = [bool(torch.equal(value, source.get_data_page(16 * row))) for row, value in enumerate(values, 1)]
    found["other rank"] = backend(model, cache, redis, target, rank=1).batch_exists(keys)
    return found


def main() -> None:
    storage.server_args = lambda: SimpleNamespace(dtype="float32", quantization=None)
    layouts = ("page_first", "page_first_direct", "layer_first")
    print("FOUND", json.dumps({layout: round_trip(layout, *sys.argv[1:4]) for layout in layouts}))


if __name__ == "__main__":
    main()
