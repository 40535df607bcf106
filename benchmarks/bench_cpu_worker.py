"""The CPU worker against transformers' `generate`: the model in the box, one thread each, greedy, batches of prompts.

    python -m benchmarks.bench_cpu_worker [--batches 1,8,32] [--rounds 4] [--out FILE]

`generate` gets the prompts as one batch without padding; the worker, a process of its own behind gRPC, as as many
requests at once, each with a salt of its own, so that nothing is reused. The two take turns, and the order is reversed
every other round. A row has figures only if the tokens agree: where an answer differs, its first other token must be
nearly tied with transformers' choice, in logits that transformers computes, else the exit code is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import transformers

from benchmarks.host import about_host, commit, versions
from benchmarks.processes import cpu_s
from benchmarks.report import RESULTS, parser, rounded, save
from benchmarks.serving.services import Services, serving
from cli.client import StemcacheClient, greedy
from cli.output import Output
from register_qa import MODEL_FOLDER, Split, draw_register
from rpc.lifecycle import run
from worker_service.model.tokenizer import TOKENIZER, Tokenizer

BATCHES = (1, 8, 32)
PROMPT_TOKENS, NEW_TOKENS = 330, 64
HOLDINGS = 16  # of a register: some 450 tokens
ROUNDS = 4
SETTINGS = {"STEMCACHE_WORKER_THREADS": "1", "OMP_NUM_THREADS": "1", "STEMCACHE_WORKER_POOL_MB": "512"}
# Logits as far apart as this are a tie: sums of the same model in another order differ by some 1e-5.
TIE = 1e-3


class Run(NamedTuple):
    """One batch: what it took, and its answers. `cpu_s` of all processes that took part."""

    seconds: float
    cpu_s: float
    answers: list[list[int]]


@dataclass(frozen=True, slots=True)
class Row:
    """`ratio`: the worker's tokens per second over transformers', median of the rounds' ratios."""

    batch: int
    prompt_tokens: int
    new_tokens: int
    ratio: float
    ratio_min: float
    ratio_max: float
    worker_tokens_per_s: float
    transformers_tokens_per_s: float
    worker_cpu_s: float
    transformers_cpu_s: float
    same_answers: int
    tied_answers: int
    wrong_answers: int


class Peer:
    """transformers with the same weights in fp32, in this process."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        torch.set_flush_denormal(True)
        transformers.utils.logging.disable_progress_bar()
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(MODEL_FOLDER, dtype=torch.float32).eval()

    def generate(self, prompts: Sequence[Sequence[int]]) -> Run:
        ids = torch.tensor(prompts)
        limits = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        with torch.inference_mode():
            answers = self._model.generate(ids, attention_mask=torch.ones_like(ids), **limits)[:, ids.shape[1] :]
        return Run(time.perf_counter() - start_s, time.process_time() - start_cpu_s, answers.tolist())

    def is_tie(self, prompt: Sequence[int], expected: Sequence[int], got: Sequence[int]) -> bool:
        """Returns whether the first token in which the answers differ has all but the logit of transformers' choice."""
        at = next(at for at, pair in enumerate(zip(expected, got, strict=True)) if pair[0] != pair[1])
        with torch.inference_mode():
            logits = self._model(torch.tensor([[*prompt, *expected[:at]]])).logits[0, -1]
        return bool(logits[expected[at]] - logits[got[at]] < TIE)


class Served:
    """The worker, asked over gRPC by this process."""

    def __init__(self, services: Services, client: StemcacheClient) -> None:
        self._services = services
        self._client = client
        self._num_runs = 0

    async def generate(self, prompts: Sequence[Sequence[int]]) -> Run:
        self._num_runs += 1
        worker, sampling = self._services.worker, greedy(NEW_TOKENS)
        start_s, start_cpu_s = time.perf_counter(), self._cpu_s()
        asked = [
            self._client.generate(worker, prompt, sampling, salt=f"{self._num_runs}.{number}")
            for number, prompt in enumerate(prompts)
        ]
        answers = await asyncio.gather(*asked)
        took_s, took_cpu_s = time.perf_counter() - start_s, self._cpu_s() - start_cpu_s
        if any(answer.usage.cached_tokens for answer in answers):
            raise SystemExit("a prompt was cached")
        return Run(took_s, took_cpu_s, [answer.token_ids for answer in answers])

    def _cpu_s(self) -> float:
        """CPU seconds of the services and of this process, which is their client."""
        children = self._services.supervisor.children.values()
        return time.process_time() + sum(cpu_s(child.pid) for child in children if child.pid is not None)


def prompts_for(batch: int, seed: int) -> list[list[int]]:
    """Returns prompts of equal length that share no first page."""
    tokenizer = Tokenizer(MODEL_FOLDER / TOKENIZER)
    registers = (draw_register(1000 * seed + at, split=Split.EVAL, holdings=HOLDINGS) for at in range(batch))
    return [list(tokenizer.encode(register.text))[:PROMPT_TOKENS] for register in registers]


async def measure(batch: int, rounds: int, peer: Peer, served: Served) -> Row:
    """Returns the row of one batch size; other prompts each round."""
    pairs, marks = [], {"same": 0, "tied": 0, "wrong": 0}
    for number in range(rounds):
        prompts = prompts_for(batch, number)
        if number % 2:
            ours = await served.generate(prompts)
            theirs = peer.generate(prompts)
        else:
            theirs = peer.generate(prompts)
            ours = await served.generate(prompts)
        pairs.append((ours, theirs))
        for prompt, expected, got in zip(prompts, theirs.answers, ours.answers, strict=True):
            marks["same" if got == expected else "tied" if peer.is_tie(prompt, expected, got) else "wrong"] += 1
    ratios = [theirs.seconds / ours.seconds for ours, theirs in pairs]
    tokens = batch * NEW_TOKENS
    return Row(
        batch=batch,
        prompt_tokens=PROMPT_TOKENS,
        new_tokens=NEW_TOKENS,
        ratio=median(ratios),
        ratio_min=min(ratios),
        ratio_max=max(ratios),
        worker_tokens_per_s=tokens / median(ours.seconds for ours, _ in pairs),
        transformers_tokens_per_s=tokens / median(theirs.seconds for _, theirs in pairs),
        worker_cpu_s=median(ours.cpu_s for ours, _ in pairs),
        transformers_cpu_s=median(theirs.cpu_s for _, theirs in pairs),
        same_answers=marks["same"],
        tied_answers=marks["tied"],
        wrong_answers=marks["wrong"],
    )


async def bench(arguments: argparse.Namespace, output: Output) -> list[Row]:
    peer, rows = Peer(), []
    with tempfile.TemporaryDirectory(prefix="stemcache-logs-") as logs:
        async with (
            serving(str(MODEL_FOLDER), "cpu", SETTINGS, Path(logs), output.progress) as services,
            StemcacheClient("", services.cluster.workers) as client,
        ):
            served = Served(services, client)
            warm_up = prompts_for(2, arguments.rounds)
            peer.generate(warm_up)
            await served.generate(warm_up)
            for batch in arguments.batches:
                rows.append(await measure(batch, arguments.rounds, peer, served))
                output.progress(str(rows[-1]))
    return rows


def report(rows: Sequence[Row], rounds: int) -> dict[str, Any]:
    instructions = torch.backends.cpu.get_cpu_capability()
    return {
        "commit": commit(),
        "host": {**about_host(), "instructions": instructions, "load_average": round(os.getloadavg()[0], 1)},
        "versions": {**versions(), "transformers": transformers.__version__},
        "threads": 1,
        "rounds": rounds,
        "rows": [rounded(asdict(row)) for row in rows],
    }


def main() -> None:
    options = parser(__doc__, rounds=ROUNDS)
    options.add_argument("--batches", type=lambda text: [int(part) for part in text.split(",")], default=BATCHES)
    options.add_argument("--out", type=Path, default=RESULTS / "cpu-worker.json")
    arguments = options.parse_args()
    rows = run(bench(arguments, Output(as_json=False)))
    save(report(rows, arguments.rounds), arguments.out)
    sys.exit(1 if any(row.wrong_answers for row in rows) else 0)


if __name__ == "__main__":
    main()
