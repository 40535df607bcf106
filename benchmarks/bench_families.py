"""What a hit saves each family of models: time to a first token behind a shared prefix against the cold prompt.

    python -m benchmarks.bench_families [--only experts latents] [--device cpu --quick] --out families.json

Random weights in the shape of whole models, in process; of models that an H200 cannot hold as many layers as it can,
since what a launch costs the host is shared by all of them. A prompt is computed in launches of TOKEN_BUDGET tokens, as
a worker does; a hit computes what follows the prefix. `saved` is the share of the cold time that the hit saves,
`of_tokens` that share over the share of tokens that it saves: 1 where each token costs the same. No launch is faster
than it reads its weights, those of each expert that a token chose among them: `weights_ms` is that time for the hit,
and `of_possible` the saved share over the most that it leaves. The cold run of a model with states leaves a snapshot
where the prefix ends, from which the hit goes on. Before a case is timed, the hit's logits are compared with the cold
run's.
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
from typing import Any, NamedTuple

import torch

from benchmarks.gpu_timer import Timer, ceilings
from benchmarks.host import commit
from benchmarks.paged_model import PAGE, PagedModel, PagedTokens
from benchmarks.report import parser, save
from tests.worker_service.published_configs import PUBLISHED
from tests.worker_service.published_mamba2 import PUBLISHED_MAMBA2
from worker_service.model.decoder import Decoder
from worker_service.model.device import prepare_process
from worker_service.model.gemm_dispatch import Invariance
from worker_service.model.runner import RunnerLimits
from worker_service.model.spec import MoeSpec

TOKEN_BUDGET = 2048
SHARED, NEW = (4_096, 16_384, 65_536), (512, 16)
QUICK_SHARED, QUICK_NEW = (128,), (32, 16)
TIMES = 5
COMMON: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_position_embeddings": SHARED[-1] + NEW[0],
    "rms_norm_eps": 1e-5,
    "vocab_size": 32_768,
}


def published(name: str, num_layers: int = 0, **others: int) -> dict[str, Any]:
    """Returns the config.json of a repository; num_layers: with its first layers only, 0: with all."""
    fields = {**(PUBLISHED | PUBLISHED_MAMBA2)[name], **others}
    if not num_layers:
        return fields
    fields["num_hidden_layers"] = num_layers
    return {field: value for field, value in fields.items() if field != "layer_types"}


FAMILIES: dict[str, dict[str, Any]] = {
    "experts": published("Qwen/Qwen3-30B-A3B"),
    "windows-sinks": published("openai/gpt-oss-20b"),
    "two-ropes": {  # Gemma-3-12b
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_size": 3840,
        "intermediate_size": 15_360,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "sliding_window": 1024,
    },
    "latents": published("deepseek-ai/DeepSeek-V3", 5, first_k_dense_replace=1),
    "short-convs": published("LiquidAI/LFM2-1.2B"),
    "mamba2": published("ibm-fms/Bamba-9B"),
    "gated-delta": published("Qwen/Qwen3-Next-80B-A3B-Instruct", 32),
    "channel-decays": published("moonshotai/Kimi-Linear-48B-A3B-Instruct"),
    "chosen-latents": published("deepseek-ai/DeepSeek-V3.2-Exp", 5, first_k_dense_replace=1),
    # Without experts that are chosen by token: the tables of random weights would name none.
    "compressed": published("deepseek-ai/DeepSeek-V4-Flash", 8, num_hash_layers=0),
}
QUICK: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 40,
    "query_pre_attn_scalar": 16,
    "num_experts": 8,
    "n_routed_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "vocab_size": 512,
}
QUICK_OF: dict[str, dict[str, Any]] = {
    "short-convs": {"full_attn_idxs": [1]},
    "mamba2": {
        "attn_layer_indices": [1],
        "attn_rotary_emb": 16,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_n_heads": 8,
    },
    "channel-decays": {
        "num_expert_group": 1,
        "topk_group": 1,
        "linear_attn_config": {
            "full_attn_layers": [2],
            "head_dim": 16,
            "kda_layers": [1, 3],
            "num_heads": 4,
            "short_conv_kernel_size": 4,
        },
    },
    "chosen-latents": {"index_head_dim": 16, "index_n_heads": 16, "index_topk": 64},
    "compressed": {
        "compress_ratios": [128, 4, 128],
        "head_dim": 32,
        "index_head_dim": 16,
        "index_n_heads": 16,
        "index_topk": 16,
        "num_key_value_heads": 1,
        "o_groups": 2,
        "o_lora_rank": 32,
    },
    "gated-delta": {
        "full_attention_interval": 2,
        "linear_key_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 16,
        "shared_expert_intermediate_size": 32,
    },
}
# Of the largest logit: what sums of other launches may differ by, far less than another prefix would make.
TOLERANCE = {torch.bfloat16: 0.02, torch.float32: 1e-3}


class Saving(NamedTuple):
    """One prefix and what follows it. `weights_ms`: in which the hit can read its weights at best."""

    family: str
    shared_tokens: int
    new_tokens: int
    cold_ms: float
    hit_ms: float
    weights_ms: float

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
        fields = {**FAMILIES[name], **COMMON}
        if quick:
            fields.pop("layer_types", None)
            fields |= QUICK | QUICK_OF.get(name, {})
        budget = 64 if quick else TOKEN_BUDGET
        limits = RunnerLimits(8, budget, Invariance.BATCH, graphs=True)
        num_tokens = max(QUICK_SHARED if quick else SHARED) + NEW[0]
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        self._budget = budget
        self.model = PagedModel(fields, num_tokens // PAGE + 1, limits, device, dtype)

    def savings(self, shared_tokens: int, new_tokens: int) -> Saving:
        self.model.free_pages()
        sequence = self.model.sequence(shared_tokens + new_tokens, snapshots=(shared_tokens,))
        self._check(sequence, shared_tokens)
        cold_ms = self._median_ms(sequence, 0)
        hit_ms = self._median_ms(sequence, shared_tokens)
        weights_ms = round(weight_bytes(self.model.model, new_tokens) / self._read_gb_per_s * 1e-6, 3)
        return Saving(self._name, shared_tokens, new_tokens, cold_ms, hit_ms, weights_ms)

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

    def _median_ms(self, sequence: PagedTokens, first: int) -> float:
        samples = []
        for _ in range(TIMES):
            started = time.perf_counter()
            self._run(sequence, first)
            samples.append((time.perf_counter() - started) * 1e3)
        return round(statistics.median(samples), 3)


def weight_bytes(model: Decoder, num_tokens: int) -> float:
    """Returns what a launch of one piece reads: every projection, and the experts that its tokens are expected to
    choose, each one equally likely."""
    num_bytes = float(sum(linear.weight.nbytes for linear in model.linears()))
    for layer in model.spec.layers:
        if isinstance(moe := layer.mlp, MoeSpec):
            chosen = moe.num_experts * (1.0 - (1.0 - moe.rule.top_k / moe.num_experts) ** num_tokens)
            rows = moe.intermediate_size * (3 if moe.activation.is_gated else 2)
            num_bytes += chosen * rows * (moe.latent_size or model.spec.hidden_size) * model.dtype.itemsize
    return num_bytes


def measure(names: Sequence[str], device: torch.device, *, quick: bool) -> list[Saving]:
    read_gb_per_s = ceilings(Timer())["read_gb_per_s"] if device.type == "cuda" else math.inf
    savings = []
    for name in names:
        bench = Bench(name, device, quick=quick, read_gb_per_s=read_gb_per_s)
        for shared in QUICK_SHARED if quick else SHARED:
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
    told.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    told.add_argument("--quick", action="store_true", help="tiny layers: tries the code, times nothing of worth")
    told.add_argument("--out", type=Path, required=True)
    options = told.parse_args()
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    prepare_process(device, 0)
    savings = measure(options.only, device, quick=options.quick)
    about = {
        "commit": commit(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
    }
    report = {"about": about, "quick": options.quick, "rows": [saving.row() for saving in savings]}
    save(report, options.out)


if __name__ == "__main__":
    main()
