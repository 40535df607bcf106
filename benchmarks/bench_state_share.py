"""What `state_share` is worth: prompt tokens of a trace that hit, in pools of one size shared out otherwise.

    python -m benchmarks.bench_state_share --trace FILE [--requests N] [--out FILE]

The trace is in Mooncake's format, and goes through the manager alone: each request is acquired, computed in one launch
and released before the next one. Pages and slots are those that a worker with the shapes of the published models would
make of the memory, in bf16, with the default settings.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import RESULTS, parser, save
from cache_service.core.cache_manager import CacheManager, ManagerConfig
from cli.replay.replay import NAMESPACE, WORKER, Request, read_trace
from session.messages import Acquire, Hello, Publish, Refusal, Release
from session.words import TOKEN_BYTES, GroupKind, GroupSpec, ReleaseReason, SequenceId
from worker_service.config import WorkerConfig
from worker_service.gpu.group_layout import GroupLayout, PageTensor
from worker_service.gpu.pool_plan import PoolDemand, plan_pages

PAGE_TOKENS = 64
INTERVAL_TOKENS = 512
SHARES = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0)
# KiB of a page of 64 tokens and of a snapshot, and the pools' sizes in GiB.
MODELS = {"Qwen3-Next 80B-A3B": (1536, 75_456, (20, 60)), "Bamba 9B": (768, 120_220, (30, 100))}


def layouts(page_kib: int, snapshot_kib: int) -> tuple[GroupLayout, ...]:
    """Returns one group of pages and one of states; sizes of a page and of a snapshot in KiB."""
    page = PageTensor(1, (page_kib, 1024), torch.uint8)
    state = PageTensor(1, (snapshot_kib, 1024), torch.uint8)
    return (
        GroupLayout("full", GroupKind.FULL, (0,), (page,)),
        GroupLayout("state", GroupKind.STATE, (1,), (state,)),
    )


def make_manager(num_pages: int, num_slots: int) -> CacheManager:
    groups = (
        GroupSpec("full", GroupKind.FULL, num_pages),
        GroupSpec("state", GroupKind.STATE, num_slots, state_interval_tokens=INTERVAL_TOKENS),
    )
    manager = CacheManager(ManagerConfig(), "replay")
    manager.hello(Hello(WORKER, "127.0.0.1:0", "replay", bytes(32), PAGE_TOKENS, groups), 0)
    return manager


def hit_rate(manager: CacheManager, requests: Iterable[Request]) -> float:
    """Returns cached tokens over prompt tokens. No prompt of the trace contains an answer, so none is generated."""
    cached = total = 0
    for number, request in enumerate(requests, 1):
        sequence, num_tokens = SequenceId(number), len(request.prompt) // TOKEN_BYTES
        grant = manager.acquire(WORKER, Acquire(sequence, NAMESPACE, request.prompt))
        total += num_tokens
        if isinstance(grant, Refusal):
            continue
        cached += grant.cached_tokens
        manager.publish(WORKER, Publish(sequence, b"", num_tokens))
        manager.release(WORKER, Release(sequence, ReleaseReason.FINISHED))
    return cached / total


def measure(model: str, budget_gib: int, share: float, trace: Path, num_requests: int | None) -> dict[str, Any]:
    page_kib, snapshot_kib, _ = MODELS[model]
    config = WorkerConfig(model="any")
    demand = PoolDemand(PAGE_TOKENS, 131_072, config.token_budget, config.max_num_seqs, config.window_share, share)
    pages, slots = plan_pages(layouts(page_kib, snapshot_kib), budget_gib << 30, demand)
    # Running sequences hold a slot each and their rolling snapshot's: here one does, so the others' are left out.
    snapshots = slots - demand.max_num_seqs
    rate = hit_rate(make_manager(pages, snapshots + 2), read_trace(trace, num_requests))
    return {
        "model": model,
        "pools_gib": budget_gib,
        "state_share": share,
        "tokens_in_pages": pages * PAGE_TOKENS,
        "snapshots": snapshots,
        "hit_rate": round(rate, 4),
    }


def main() -> None:
    told = parser(__doc__)
    told.add_argument("--trace", type=Path, required=True)
    told.add_argument("--requests", type=int, help="how many requests of the trace to replay; default: all")
    told.add_argument("--out", type=Path, default=RESULTS / "state_share.json")
    options = told.parse_args()
    rows = []
    for model, (_, _, budgets) in MODELS.items():
        for budget_gib in budgets:
            for share in SHARES:
                rows.append(measure(model, budget_gib, share, options.trace, options.requests))
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    save({"trace": options.trace.name, "requests": options.requests, "rows": rows}, options.out)


if __name__ == "__main__":
    main()
