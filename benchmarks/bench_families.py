"""What a hit saves each family of models: time to a first token behind a shared prefix against the cold prompt.

    python -m benchmarks.bench_families [--only experts latents] [--device cpu --quick] --out families.json

Random weights of the families' real layer shapes, in process: of large experts as many layers as 80 GB hold, since what
a launch costs the host is shared by all of a model's layers. A prompt is computed in launches of
TOKEN_BUDGET tokens, as a worker does; a hit computes what follows the prefix. `saved` is the share of the cold time
that the hit saves, `of_tokens` that share over the share of tokens that it saves: 1 where each token costs the same.
The cold run of a model with states leaves a snapshot where the prefix ends, from which the hit goes on. Before a case
is timed, the hit's logits are compared with the cold run's.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.paged_model import PAGE, PagedModel, PagedTokens
from benchmarks.report import parser, save
from tests.worker_service.published_configs import PUBLISHED
from worker_service.model.device import prepare_process
from worker_service.model.gemm_dispatch import Invariance
from worker_service.model.runner import RunnerLimits

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


def published(name: str, num_layers: int, **others: int) -> dict[str, Any]:
    """Returns the config.json of a repository, with its first layers only."""
    fields = {**PUBLISHED[name], "num_hidden_layers": num_layers, **others}
    return {field: value for field, value in fields.items() if field != "layer_types"}


FAMILIES: dict[str, dict[str, Any]] = {
    "experts": published("Qwen/Qwen3-30B-A3B", 24),
    "windows-sinks": published("openai/gpt-oss-20b", 8),
    "two-ropes": {  # Gemma-3-12b
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_size": 3840,
        "intermediate_size": 15_360,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "sliding_window": 1024,
    },
    "latents": published("deepseek-ai/DeepSeek-V3", 4, first_k_dense_replace=1),
    "short-convs": {  # LFM2-1.2B
        "architectures": ["Lfm2ForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 8,
        "layer_types": ["conv", "conv", "full_attention", "conv"] * 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "conv_L_cache": 3,
        "norm_eps": 1e-5,
        "block_auto_adjust_ff_dim": False,
    },
    "mamba2": {  # Bamba-9B
        "architectures": ["BambaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 8,
        "attn_layer_indices": [3],
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "mamba_d_conv": 4,
        "mamba_d_head": 64,
        "mamba_d_state": 256,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_n_heads": 128,
    },
    "gated-delta": published("Qwen/Qwen3-Next-80B-A3B-Instruct", 16),
    "channel-decays": published("moonshotai/Kimi-Linear-48B-A3B-Instruct", 12),
    "chosen-latents": published("deepseek-ai/DeepSeek-V3.2-Exp", 4, first_k_dense_replace=1),
    # Without experts that are chosen by token: the tables of random weights would name none.
    "compressed": published("deepseek-ai/DeepSeek-V4-Flash", 6, num_hash_layers=0),
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
    "short-convs": {"layer_types": ["conv", "full_attention", "conv"]},
    "mamba2": {"attn_layer_indices": [1], "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_heads": 8},
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
    """One prefix and what follows it, in milliseconds."""

    family: str
    shared_tokens: int
    new_tokens: int
    cold_ms: float
    hit_ms: float

    @property
    def saved(self) -> float:
        return 1.0 - self.hit_ms / self.cold_ms

    @property
    def of_tokens(self) -> float:
        return self.saved / (self.shared_tokens / (self.shared_tokens + self.new_tokens))

    def row(self) -> dict[str, object]:
        return {**self._asdict(), "saved": round(self.saved, 4), "of_tokens": round(self.of_tokens, 4)}


class Bench:
    """One family's model, and a pool for one longest prompt."""

    def __init__(self, name: str, device: torch.device, *, quick: bool) -> None:
        self._name = name
        self._device = device
        fields = {**FAMILIES[name], **COMMON, **(QUICK | QUICK_OF.get(name, {}) if quick else {})}
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
        return Saving(self._name, shared_tokens, new_tokens, cold_ms, self._median_ms(sequence, shared_tokens))

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


def measure(names: Sequence[str], device: torch.device, *, quick: bool) -> list[Saving]:
    savings = []
    for name in names:
        bench = Bench(name, device, quick=quick)
        for shared in QUICK_SHARED if quick else SHARED:
            for new in QUICK_NEW if quick else NEW:
                savings.append(bench.savings(shared, new))
                print(json.dumps(savings[-1].row()), file=sys.stderr, flush=True)
        del bench
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
    about = {"device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu", "torch": torch.__version__}
    report = {"about": about, "quick": options.quick, "rows": [saving.row() for saving in savings]}
    save(report, options.out)


if __name__ == "__main__":
    main()
