"""What pages held ahead of decoding streams cost the cache, and how long streams go on without the cache service.

    python -m benchmarks.bench_decode_ahead --trace TRACE --out FILE

The worker's scheduler and the manager, without a model: a trace's prompts, `--at-once` of them at a time. Each is
answered with its trace's number of tokens but asks for `--max-tokens`, as clients do that do not know the length.
All runs get the same prompts in the same order. They count tokens and pages and time nothing. `ahead` is the
number of tokens that a decoding stream has pages for beyond its own, sampled at each 64th launch.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import quantiles
from typing import Any

from benchmarks.report import parser, save
from cache_service.core.cache_manager import CacheManager, ManagerConfig
from cli.replay.replay import Request as TraceRequest
from cli.replay.replay import read_trace
from session.messages import Hello
from session.words import GroupKind, GroupSpec, Namespace, SequenceId, WorkerId
from worker_service.core.launches import Launch
from worker_service.core.sampling_params import SamplingParams
from worker_service.core.scheduler import Scheduler
from worker_service.core.scheduler_config import SchedulerConfig
from worker_service.core.sequence import Request, State

WORKER = WorkerId("bench")
NAMESPACE = Namespace("bench")
PAGE_TOKENS = 16
VOCAB = 1 << 30
END = 0
# `decode_ahead_tokens` and `max_decode_ahead_tokens`: the worker's defaults, and fixed lengths whatever is free.
SETTINGS = {"as_free_pages_allow": (32, 8192), **{f"{tokens}_tokens": (tokens, 0) for tokens in (32, 256, 1024, 4096)}}


@dataclass
class Run:
    """One setting's run over the trace."""

    scheduler: Scheduler
    manager: CacheManager
    requests: Iterator[TraceRequest]
    at_once: int
    max_tokens: int
    lengths: dict[SequenceId, int] = field(default_factory=dict)  # tokens of the answers that are under way
    num_requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    num_preemptions: int = 0
    num_launches: int = 0
    ahead: list[int] = field(default_factory=list)

    def run(self) -> dict[str, Any]:
        while self._fill() or self.lengths:
            step = self.scheduler.next_step()
            if step is not None:
                self.scheduler.apply(self.manager.step(WORKER, step, self.num_launches))
            launch = self.scheduler.next_launch()
            if launch is None:
                self.scheduler.retry_refused()
                continue
            self.num_launches += 1
            self._complete(launch)
            if self.num_launches % 64 == 0:
                self._look()
        return self._row()

    def _fill(self) -> bool:
        """Sends requests until as many are under way as shall be. Returns whether the trace had one."""
        while len(self.lengths) < self.at_once:
            request = next(self.requests, None)
            if request is None:
                return False
            self.num_requests += 1
            sequence_id = SequenceId(self.num_requests)
            self.lengths[sequence_id] = max(len(request.output) // 4, 1)
            sampling = SamplingParams(self.max_tokens)
            self.scheduler.add(Request(sequence_id, NAMESPACE, request.prompt, sampling))
        return True

    def _complete(self, launch: Launch) -> None:
        accepted = [(self._token(row.sequence_id),) for row in launch.rows if row.samples]
        for output in self.scheduler.complete(launch, accepted):
            if output.usage is not None:
                del self.lengths[output.sequence_id]
                self.prompt_tokens += output.usage.prompt_tokens
                self.cached_tokens += output.usage.cached_tokens
                self.num_preemptions += output.usage.num_preemptions

    def _token(self, sequence_id: SequenceId) -> int:
        usage = self.scheduler.usage(sequence_id)
        assert usage is not None
        if usage.generated_tokens + 1 >= self.lengths[sequence_id]:
            return END
        return 1 + sequence_id * 2048 + usage.generated_tokens

    def _look(self) -> None:
        for sequence in self.scheduler._queues.leased:
            if sequence.state is State.RUNNING and sequence.launched_len >= sequence.in_prefill_until:
                self.ahead.append(len(sequence.tables[0]) * PAGE_TOKENS - sequence.launched_len)

    def _row(self) -> dict[str, Any]:
        (worker,) = self.manager.stats().workers
        cuts = quantiles(self.ahead, n=20) if len(self.ahead) > 1 else [0] * 19
        return {
            "requests": self.num_requests,
            "hit_rate": round(self.cached_tokens / self.prompt_tokens, 4),
            "evicted_pages": worker.groups[0].num_evicted,
            "preemptions": self.num_preemptions,
            "refusals": worker.num_refusals,
            "launches": self.num_launches,
            "ahead_tokens_p5": round(cuts[0]),
            "ahead_tokens_p50": round(cuts[9]),
        }


def measured(trace: Path, num_pages: int, ahead: tuple[int, int], options: argparse.Namespace) -> dict[str, Any]:
    group = GroupSpec("full", GroupKind.FULL, num_pages, 64)
    config = SchedulerConfig(
        page_tokens=PAGE_TOKENS,
        groups=(group,),
        max_model_len=200_000,
        vocab_size=VOCAB,
        eos_token_ids=frozenset({END}),
        token_budget=options.token_budget,
        max_num_seqs=options.at_once,
        decode_ahead_tokens=ahead[0],
        max_decode_ahead_tokens=ahead[1],
    )
    manager = CacheManager(replace(ManagerConfig(), max_kept_bytes=1 << 30), "epoch")
    hello = Hello(WORKER, "127.0.0.1:1", "i", b"f" * 32, PAGE_TOKENS, (group,))
    scheduler = Scheduler(config)
    scheduler.readmit(manager.hello(hello, 0))
    run = Run(scheduler, manager, read_trace(trace, options.requests), options.at_once, options.max_tokens)
    return run.run()


def main() -> None:
    told = parser(__doc__, requests=2000, at_once=32, max_tokens=4096, token_budget=8192)
    told.add_argument("--trace", type=Path, required=True, help="in Mooncake's format")
    told.add_argument("--pages", default="50000,100000,200000", help="sizes of the pool, with commas between")
    told.add_argument("--out", type=Path)
    options = told.parse_args()
    rows = []
    for num_pages in map(int, options.pages.split(",")):
        for name, ahead in SETTINGS.items():
            row = {"pages": num_pages, "ahead": name, **measured(options.trace, num_pages, ahead, options)}
            print(json.dumps(row), file=sys.stderr)
            rows.append(row)
    save({"rows": rows, "at_once": options.at_once, "max_tokens": options.max_tokens}, options.out)


if __name__ == "__main__":
    main()
