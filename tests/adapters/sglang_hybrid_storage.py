"""Run by the interpreter that SGLang is installed in: pools of a hybrid model through the storage, and SGLang's own
injector of failures around it, on a CPU.

    python -m tests.adapters.sglang_hybrid_storage MODEL CACHE_ADDRESS REDIS_URL

Prints one JSON object of what was found for each layout, and under injected failures.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost

from adapters.sglang import storage
from tests.adapters.sglang_storage import backend, equal, host_pool, slots

PAGES, WINDOW_TOKENS, WINDOW_PAGES = 8, 40, 3
KV, SWA, MAMBA = PoolName.KV, PoolName.SWA, PoolName.MAMBA
# Windows behind some of the pages, and states at two boundaries, as after two requests.
WINDOWS, STATES = range(2, PAGES), (4, PAGES - 1)
INJECTED = {"SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.4", "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.002"}
INJECTED_ROUNDS = 60


def state_pool(layout: str) -> Any:
    info = MambaStateBufferInfo(conv=(torch.zeros(2, 9, 128, 2),), temporal=torch.zeros(2, 9, 2, 4, 8))
    pool = MambaPoolHost(info, 2.0, 0, device_capacity=8, pin_memory=False, device="cpu", layout=layout)
    for slot in range(1, 1 + PAGES):
        pool.set_from_flat_data_page(slot, torch.randn(pool.size_per_token // 4).view(torch.uint8))
    return pool


def pools(layout: str) -> dict[Any, Any]:
    return {KV: host_pool(layout), SWA: host_pool(layout), MAMBA: state_pool(layout)}


def stored(services: list[str], of_model: dict[Any, Any], **changes: Any) -> Any:
    made = backend(*services, of_model[KV], **changes)
    for name, pool in of_model.items():
        made.register_mem_host_pool_v2(pool, name)
    made.on_host_pools_registered()
    return made


def rows(name: Any, *pages: int) -> torch.Tensor:
    """Page 0 of the path is in page or slot 1 of a pool."""
    return torch.tensor([1 + page for page in pages]) if name == MAMBA else slots(*[1 + page for page in pages])


def transfer(name: Any, keys: list[str], pages: Any, at: Any = None) -> Any:
    indices = rows(name, *(pages if at is None else at))
    policy = PoolHitPolicy.TRAILING_PAGES
    return PoolTransfer(name=name, keys=[keys[page] for page in pages], host_indices=indices, hit_policy=policy)


def wanted(pages: int = PAGES) -> list[Any]:
    """What SGLang asks for before it knows the boundary."""
    policy = PoolHitPolicy.TRAILING_PAGES
    count = min(pages, WINDOW_PAGES)
    return [
        PoolTransfer(name=SWA, keys=["__placeholder__"] * count, hit_policy=policy),
        PoolTransfer(name=MAMBA, keys=["__placeholder__"], hit_policy=policy),
    ]


def chain(text: str) -> list[str]:
    return [hashlib.sha256(f"{text} {page}".encode()).hexdigest() for page in range(PAGES)]


def write(to: Any, keys: list[str]) -> dict[str, list[bool]]:
    """In SGLang's order: pools beside keys and values first."""
    done = to.batch_set_v2([transfer(SWA, keys, WINDOWS), transfer(MAMBA, keys, STATES)])
    done[KV] = to.batch_set_v1(keys, rows(KV, *range(PAGES)))
    return {str(name): ways for name, ways in done.items()}


def said(found: Any) -> list[Any]:
    by_pool = {str(name): pages for name, pages in sorted(found.extra_pool_hit_pages.items())}
    return [found.kv_hit_pages, by_pool, found.restorable_prefix_pages]


def hybrid(layout: str, services: list[str]) -> dict[str, object]:
    source, target, keys = pools(layout), pools(layout), chain(layout)
    first, second = stored(services, source), stored(services, target)
    found: dict[str, object] = {"before": said(first.batch_exists_v2(keys, wanted()))}
    found["written"] = write(first, keys)
    found["whole"] = said(second.batch_exists_v2(keys, wanted()))
    found["shorter"] = said(second.batch_exists_v2(keys[:7], wanted()))
    found["no state"] = said(second.batch_exists_v2(keys[:4], wanted()))
    found["tokens alone"] = [said(second.batch_exists_v2(keys)), second.batch_exists(keys)]
    read = second.batch_get_v2([transfer(SWA, keys, (2, 3, 4), at=(5, 6, 7)), transfer(MAMBA, keys, (4,), at=(2,))])
    found["read"] = {str(name): ways for name, ways in read.items()}
    found["same"] = [
        equal(source[SWA], (3, 4, 5), target[SWA], (6, 7, 8)),
        bool(torch.equal(source[MAMBA].get_data_page(5), target[MAMBA].get_data_page(3))),
    ]
    found["never written"] = list(second.batch_get_v2([transfer(MAMBA, keys, (5,))]).values())
    found["other rank"] = said(stored(services, target, rank=1).batch_exists_v2(keys, wanted()))
    return found


def injected(services: list[str]) -> dict[str, object]:
    """Under failures nothing raises, and what is said to be read is right."""
    os.environ.update(INJECTED)
    source, target = pools("page_first"), pools("page_first")
    first, second = stored(services, source), stored(services, target)
    chance, counts = random.Random(0), {"failed": 0, "read": 0, "wrong": 0}
    for number in range(INJECTED_ROUNDS):
        keys = chain(f"injected {number // 3}")
        write(first, keys)
        found = second.batch_exists_v2(keys[: chance.choice((5, PAGES))], wanted())
        if not found.kv_hit_pages:
            counts["failed"] += 1
            continue
        last = found.kv_hit_pages - 1
        for pool in target.values():
            pool.kv_buffer.zero_() if hasattr(pool.kv_buffer, "zero_") else None
        tokens = second.batch_get_v1(keys[: last + 1], rows(KV, *range(last + 1)))
        state = second.batch_get_v2([transfer(MAMBA, keys, (last,))])[MAMBA]
        counts["failed" if False in (*tokens, *state) else "read"] += 1
        pages = tuple(1 + page for page in range(tokens.index(False) if False in tokens else len(tokens)))
        counts["wrong"] += not equal(source[KV], pages, target[KV], pages)
        at = 1 + last
        counts["wrong"] += all(state) and not torch.equal(
            source[MAMBA].get_data_page(at), target[MAMBA].get_data_page(at)
        )
    return {"injector": type(first).__name__, **counts}


def main() -> None:
    storage.server_args = lambda: SimpleNamespace(dtype="float32", quantization=None)
    storage.window_tokens = lambda: WINDOW_TOKENS
    services = sys.argv[1:4]
    found: dict[str, object] = {layout: hybrid(layout, services) for layout in ("page_first", "page_first_direct")}
    found["injected"] = injected(services)
    print("FOUND", json.dumps(found))


if __name__ == "__main__":
    main()
