"""What a hit saves each family of models: time to a first token behind a shared prefix against the cold prompt.

    python -m benchmarks.bench_families [--only experts latents] [--device cpu --quick] --out families.json

Random weights in the shape of whole models, in process; of models that an H200 cannot hold, or not compute in seconds,
as many layers as share what a launch costs the host. A prompt is computed in launches of TOKEN_BUDGET tokens, as a
worker does; a hit computes what follows the prefix. `saved` is the share of the cold time that the hit saves,
`of_tokens` that share over the share of tokens that it saves: 1 where each token costs the same. No launch is faster
than it reads its weights, those of each expert that a token chose among them: `weights_ms` is that time for the hit,
and `of_possible` the saved share over the most that it leaves. The cold run of a model with states leaves a snapshot
where the prefix ends, from which the hit goes on. Experts are random in the format in which the model is published
(`weights`), made in it, and read as it. Before a case is timed, the hit's logits are compared with the cold run's.
"""

from __future__ import annotations

import gc
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.family_configs import BF16, EXPERTS, FAMILIES, MAX_TOKENS, STORED_BYTES, fields_of
from benchmarks.gpu_timer import Timer, ceilings
from benchmarks.host import commit
from benchmarks.paged_model import PAGE, PagedModel, PagedTokens
from benchmarks.report import parser, save
from worker_service.model.decoder import Decoder
from worker_service.model.device import prepare_process
from worker_service.model.gemm_dispatch import Invariance
from worker_service.model.runner import RunnerLimits
from worker_service.model.spec import MoeSpec

TOKEN_BUDGET = 2048
SHARED, NEW = (4_096, 16_384, 65_536), (512, 16)
QUICK_SHARED, QUICK_NEW = (128,), (32, 16)
TIMES = 5
# Of the largest logit: what sums of other launches may differ by, far less than another prefix would make.
TOLERANCE = {torch.bfloat16: 0.02, torch.float32: 1e-3}


class Saving(NamedTuple):
    """One prefix and what follows it. `weights_ms`: in which the hit can read its weights at best; `weights`: the
    format of experts."""

    family: str
    shared_tokens: int
    new_tokens: int
    cold_ms: float
    hit_ms: float
    weights_ms: float
    weights: str = BF16

    @property
    def saved(self) -> float:
        return 1.0 - self.hit_ms / self.cold_ms

    @property
    def of_tokens(self) -> float:
        return self.saved / self._saved_tokens

    @property
    def of_possible(self) -> float:
        return self.saved / min(self._saved_tokens, 1.0 - self.weights_ms / self.cold_ms)

    @property
    def _saved_tokens(self) -> float:
        return self.shared_tokens / (self.shared_tokens + self.new_tokens)

    def row(self) -> dict[str, object]:
        shares = {"saved": self.saved, "of_tokens": self.of_tokens, "of_possible": self.of_possible}
        return {**self._asdict(), **{name: round(share, 4) for name, share in shares.items()}}


class Bench:
    """One family's model, and a pool for one longest prompt."""

    def __init__(self, name: str, device: torch.device, *, quick: bool, read_gb_per_s: float = math.inf) -> None:
        self._name = name
        self._read_gb_per_s = read_gb_per_s
        self._weights = FAMILIES[name].weights
        budget = 64 if quick else TOKEN_BUDGET
        limits = RunnerLimits(8, budget, Invariance.BATCH, graphs=True)
        num_tokens = max(QUICK_SHARED) + NEW[0] if quick else MAX_TOKENS
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        self._budget = budget
        fields = fields_of(name, quick=quick)
        self.model = PagedModel(
            fields,
            num_tokens // PAGE + 1,
            limits,
            device,
            dtype,
            experts=EXPERTS[self._weights],
            factors=FAMILIES[name].factors,
        )

    def savings(self, shared_tokens: int, new_tokens: int) -> Saving:
        self.model.free_pages()
        sequence = self.model.sequence(shared_tokens + new_tokens, snapshots=(shared_tokens,))
        self._check(sequence, shared_tokens)
        # The longest prompts take seconds.
        cold_ms = self._median_ms(sequence, 0, min(TIMES, max(1, SHARED[-1] // shared_tokens)))
        hit_ms = self._median_ms(sequence, shared_tokens, TIMES)
        num_bytes = weight_bytes(self.model.model, new_tokens, self._weights)
        weights_ms = round(num_bytes / self._read_gb_per_s * 1e-6, 3)
        return Saving(self._name, shared_tokens, new_tokens, cold_ms, hit_ms, weights_ms, self._weights)

    def _check(self, sequence: PagedTokens, shared_tokens: int) -> None:
        """Raises where the hit gives a new token other logits than the cold run: a wrong page shows in the last ones, a
        wrong snapshot in the first."""
        num_new = len(sequence.tokens) - shared_tokens
        cold, hit = (self._last_logits(sequence, first)[-num_new:] for first in (0, shared_tokens))
        num_both = min(len(cold), len(hit))
        cold, hit = cold[-num_both:], hit[-num_both:]
        difference = (cold - hit).abs().max().item() / cold.abs().max().item()
        if not difference <= TOLERANCE[self.model.model.dtype]:
            raise AssertionError(f"{self._name}: a hit's logits differ by {difference:.3f} of the largest")

    def _last_logits(self, sequence: PagedTokens, first: int) -> torch.Tensor:
        """Returns the logits of the last launch's tokens."""
        *before, last = self._launches(sequence, first)
        self._launch(sequence, first, before)
        return self.model.runner.logits(self.model.batch([sequence], *last))

    def _launches(self, sequence: PagedTokens, first: int) -> list[tuple[int, int]]:
        length = len(sequence.tokens)
        return list(pairwise([*range(first, length, self._budget), length]))

    def _launch(self, sequence: PagedTokens, first: int, launches: Sequence[tuple[int, int]]) -> None:
        self.model.begin(sequence, first)
        for begin, end in launches:
            self.model.runner.run(self.model.batch([sequence], begin, end))

    def _run(self, sequence: PagedTokens, first: int) -> None:
        self._launch(sequence, first, self._launches(sequence, first))

    def _median_ms(self, sequence: PagedTokens, first: int, times: int) -> float:
        samples = []
        for _ in range(times):
            started = time.perf_counter()
            self._run(sequence, first)
            samples.append((time.perf_counter() - started) * 1e3)
        return round(statistics.median(samples), 3)


def weight_bytes(model: Decoder, num_tokens: int, weights: str = BF16) -> float:
    """Returns what a launch of one piece reads: every projection, and the experts that its tokens are expected to
    choose, each one equally likely. `weights`: the format of experts; BF16 is any that the model computes in."""
    of_value = STORED_BYTES.get(weights, model.dtype.itemsize)
    num_bytes = float(sum(linear.weight.nbytes for linear in model.linears()))
    for layer in model.spec.layers:
        if isinstance(moe := layer.mlp, MoeSpec):
            chosen = moe.num_experts * (1.0 - (1.0 - moe.rule.top_k / moe.num_experts) ** num_tokens)
            rows = moe.intermediate_size * (3 if moe.activation.is_gated else 2)
            num_bytes += chosen * rows * (moe.latent_size or model.spec.hidden_size) * of_value
    return num_bytes


def measure(
    names: Sequence[str], device: torch.device, *, quick: bool, prefixes: Sequence[int] = SHARED
) -> list[Saving]:
    read_gb_per_s = ceilings(Timer())["read_gb_per_s"] if device.type == "cuda" else math.inf
    savings = []
    for name in names:
        bench = Bench(name, device, quick=quick, read_gb_per_s=read_gb_per_s)
        for shared in QUICK_SHARED if quick else prefixes:
            for new in QUICK_NEW if quick else NEW:
                savings.append(bench.savings(shared, new))
                print(json.dumps(savings[-1].row()), file=sys.stderr, flush=True)
        del bench
        # Captured launches and their runner hold each other: without this the next model would find no memory.
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return savings


def main() -> None:
    told = parser(__doc__)
    told.add_argument("--only", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    told.add_argument("--shared", nargs="+", type=int, choices=SHARED, default=SHARED, help="tokens of the prefixes")
    told.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    told.add_argument("--quick", action="store_true", help="tiny layers: tries the code, times nothing of worth")
    told.add_argument("--out", type=Path, required=True)
    options = told.parse_args()
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    prepare_process(device, 0)
    savings = measure(options.only, device, quick=options.quick, prefixes=options.shared)
    about = {
        "commit": commit(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
    }
    report = {"about": about, "quick": options.quick, "rows": [saving.row() for saving in savings]}
    save(report, options.out)


if __name__ == "__main__":
    main()
