"""Tiny random models of every family as Hugging Face folders, and a runner that takes sequences with their pages."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import transformers

from benchmarks.paged_model import PagedTokens
from session.words import GroupKind, PageId, StateSlot
from tests.worker_service.state_models import EXPERTS, STATE_MODELS
from worker_service.core.batch import Batch, SampledRow, build_batch
from worker_service.core.launch_plan import Row
from worker_service.core.runner_port import LaunchTokens
from worker_service.core.sampling_params import SamplingParams
from worker_service.core.sequence import Sequence as CoreSequence
from worker_service.gpu.group_layout import GroupLayout
from worker_service.gpu.page_pools import PagePools
from worker_service.model.config import read_model_spec
from worker_service.model.decoder import Decoder
from worker_service.model.page_layouts import page_layouts
from worker_service.model.recurrent_specs import GatedDeltaSpec, KimiDeltaSpec, Mamba2Spec
from worker_service.model.runner import Runner, RunnerLimits
from worker_service.model.spec import STATE_PAGE_TOKENS, ModelSpec
from worker_service.model.weight_formats import ExpertFormat
from worker_service.model.weights import open_weights

CPU = torch.device("cpu")
PAGE = 16
VOCAB = 97
NUM_PAGES = 40
# Of a STATE group, behind slots that are numbered as the pages are: the snapshot at a page's end has its number.
NUM_WORKING = 1000
NOT_STARTED = -1
# A recurrence whose decays were exp(0.5 .. 1.5) would forget a token after the next one; so it remembers some twenty.
MEMORY = 4.0

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
_LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
_SLIDING = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}

_MIXTRAL = {"num_local_experts": 5, "num_experts_per_tok": 2}
_GLM4_MOE = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
    "use_qk_norm": True,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
    "pad_token_id": None,
}

_GEMMA = {"head_dim": 16, "num_hidden_layers": 4, "query_pre_attn_scalar": 24, "pad_token_id": None}
_GEMMA3_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
_GPT_OSS = {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "sliding_window": 20,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "intermediate_size": 24,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 64,
    },
    "pad_token_id": None,
}

_DEEPSEEK = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
_DEEPSEEK_YARN = {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.9}

# Fewer tokens are chosen than a page has, so that selection matters in every test.
_SPARSE = {**_DEEPSEEK, "index_n_heads": 16, "index_head_dim": 16, "index_topk": 13, "head_dim": 8}

_V4 = {
    "head_dim": 32,
    "q_lora_rank": 24,
    "num_key_value_heads": 1,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "max_position_embeddings": 1024,
    "partial_rotary_factor": 0.25,
    "o_groups": 2,
    "o_lora_rank": 16,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 7,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
    "mlp_layer_types": ["hash_moe", "moe", "moe"],
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 256,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    },
    "pad_token_id": None,
}

# What differs from SIZES, by name: (family, fields).
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied-llama3": ("Llama", {"tie_word_embeddings": True, "head_dim": 16, "rope_parameters": _LLAMA3}),
    "llama-biases-linear": ("Llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": _LINEAR}),
    "llama-wide-heads-yarn": ("Llama", {"head_dim": 16, "rope_parameters": _YARN}),
    "llama-dynamic": ("Llama", {"rope_parameters": _DYNAMIC}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-mixed-windows": ("Qwen2", _SLIDING),
    # As model cards ask for: the factor is added, max_position_embeddings stays as trained, prompts are longer.
    "qwen2-yarn-beyond": (
        "Qwen2",
        {"max_position_embeddings": 32, "rope_parameters": {**_YARN, "original_max_position_embeddings": 32}},
    ),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-tied-windows": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True, **_SLIDING}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window-7": ("Mistral", {"sliding_window": 7}),
    "mixtral": ("Mixtral", {"sliding_window": None, **_MIXTRAL}),
    "mixtral-window-20": ("Mixtral", {"sliding_window": 20, **_MIXTRAL}),
    "qwen3-moe": ("Qwen3Moe", {"head_dim": 16, **EXPERTS}),
    "qwen3-moe-sparse": (
        "Qwen3Moe",
        {"head_dim": 16, **EXPERTS, "norm_topk_prob": True, "decoder_sparse_step": 2, **_SLIDING},
    ),
    "gpt-oss": ("GptOss", _GPT_OSS),
    "gemma2": ("Gemma2", {**_GEMMA, "sliding_window": 20, "tie_word_embeddings": True}),
    "gemma3": (
        "Gemma3",
        {**_GEMMA, "sliding_window": 20, "sliding_window_pattern": 3, "rope_parameters": _GEMMA3_ROPES},
    ),
    "mimo-v2": (
        "MiMoV2Flash",
        {
            "num_hidden_layers": 4,
            "head_dim": 24,
            "v_head_dim": 16,
            "sliding_window": 20,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "attention_bias": True,
        },
    ),
    "cohere2": (
        "Cohere2",
        {"num_hidden_layers": 4, "sliding_window": 20, "logit_scale": 0.25, "pad_token_id": None},
    ),
    "deepseek-v2-lite": ("DeepseekV2", {**_DEEPSEEK, "q_lora_rank": None}),
    "deepseek-v2": (
        "DeepseekV2",
        {**_DEEPSEEK, "topk_method": "group_limited_greedy", "rope_parameters": _DEEPSEEK_YARN},
    ),
    "deepseek-v3": ("DeepseekV3", {**_DEEPSEEK, "rope_parameters": _DEEPSEEK_YARN, "attention_bias": True}),
    "glm4-lite": ("Glm4MoeLite", {**_DEEPSEEK, "n_group": 1, "topk_group": 1}),
    "deepseek-v32": ("DeepseekV32", {**_SPARSE, "rope_parameters": _DEEPSEEK_YARN}),
    # The second layer, and the last one, take the choice of the one before.
    "glm-dsa": (
        "GlmMoeDsa",
        {**_SPARSE, "num_hidden_layers": 4, "index_topk": 7, "indexer_types": ["full", "shared", "full", "shared"]},
    ),
    # As many as there are tokens: attention goes to all of them.
    "glm-dsa-all": ("GlmMoeDsa", {**_SPARSE, "index_topk": 300, "attention_bias": True, "n_group": 1, "topk_group": 1}),
    "glm4-moe": ("Glm4Moe", {"head_dim": 16, **_GLM4_MOE}),
    # A prompt of four pages has more entries than are chosen, and heavy ones.
    "deepseek-v4": ("DeepseekV4", _V4),
    **STATE_MODELS,
    "mistral-window-20": ("Mistral", {"sliding_window": 20, "head_dim": 16}),
}


def make_config(name: str) -> Any:
    family, fields = MODELS[name]
    return config_of(family, {**SIZES, **fields})


def config_of(family: str, fields: dict[str, Any]) -> Any:
    """The Hugging Face config of a family's language model."""
    kind = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    return kind(**fields, architectures=[f"{family}ForCausalLM"])


def make_reference(name: str, folder: Path) -> Any:
    """The Hugging Face model, saved to the folder."""
    model = random_reference(make_config(name), seed=len(name), spread=0.15)
    model.save_pretrained(folder)
    return model


def random_reference(config: Any, *, seed: int, spread: float) -> Any:
    """The Hugging Face model; `spread` is the deviation of its matrices.

    Norms and biases are random too: ones and zeros hide mistakes.
    """
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    (architecture,) = config.architectures
    model = getattr(transformers, architecture)(config).eval()
    with torch.no_grad():
        for parameter in (*model.parameters(), *_choice_biases(model)):
            if parameter.dim() == 1:
                parameter.copy_(torch.rand_like(parameter) + 0.5)
            else:
                parameter.copy_(torch.randn_like(parameter) * spread)
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):
                scores = torch.rand(buffer.shape[0], config.n_routed_experts)
                buffer.copy_(scores.topk(buffer.shape[1]).indices)
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.sub_(MEMORY)
    return model


def _choice_biases(model: Any) -> list[torch.Tensor]:
    return [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]


def random_tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (count,), generator=generator).tolist()


def num_pages_of(layouts: Sequence[GroupLayout], num_pages: int) -> list[int]:
    return [num_pages + (NUM_WORKING if layout.kind is GroupKind.STATE else 0) for layout in layouts]


def page_of(config: ModelSpec) -> int:
    """Returns PAGE, or the grid of scans for a model with such layers."""
    scans = GatedDeltaSpec | KimiDeltaSpec | Mamba2Spec
    has_scans = any(isinstance(mixer, scans) for layer in config.layers for mixer in layer.mixers)
    return STATE_PAGE_TOKENS if has_scans else max(config.page_tokens, PAGE) if config.streams else PAGE


class Part(NamedTuple):
    """Tokens [first, end) of a sequence, computed by one launch."""

    sequence: PagedTokens
    first: int
    end: int


class Bench:
    """A model on the CPU with pages of its own, poisoned but for page 0: what was never written must never be read.

    A sequence's first part begins from the snapshot before it; each part leaves one at each boundary that it passes.
    """

    page: int

    def __init__(
        self,
        folder: Path,
        device: torch.device = CPU,
        dtype: torch.dtype = torch.float32,
        limits: RunnerLimits | None = None,
        kv_dtype: torch.dtype | None = None,
        index_dtype: torch.dtype | None = None,
        *,
        kept_formats: Collection[ExpertFormat] = (),
        model: Decoder | None = None,
    ) -> None:
        """`model` is what another bench has loaded of the folder."""
        config = read_model_spec(folder)
        self.page = page_of(config)
        layouts = page_layouts(config, dtype, self.page, kv_dtype, index_dtype)
        self.config = config
        self.pages = PagePools(layouts, num_pages_of(layouts, NUM_PAGES), self.page, device)
        for layer in range(len(config.layers)):
            for pages in self.pages.planes(layer):
                pages[1:].fill_(torch.nan)
        if model is None:
            model = Decoder(config, open_weights(folder, config, dtype, device, kept_formats=kept_formats), device)
        self.model = model
        self.runner = Runner(self.model, self.pages, device, limits)
        self._slots = cycle(range((limits or RunnerLimits()).max_num_seqs))
        self._working = cycle(range(NUM_PAGES + 1, NUM_PAGES + NUM_WORKING + 1))

    def sequence(self, tokens: Sequence[int], *page_ids: Sequence[int], **sampling: Any) -> PagedTokens:
        """The same page ids serve every group unless each has its own."""
        groups = self.pages.num_groups
        tables = page_ids if len(page_ids) == groups else page_ids * groups
        made = PagedTokens(array("i", tokens), [array("i", ids) for ids in tables], SamplingParams(**sampling))
        made.prompt_len = len(tokens)
        made.start_len = NOT_STARTED
        if made.sampling.has_penalties:
            made.penalty_slot = next(self._slots)
        if self.state_groups:
            working, rolling = PageId(next(self._working)), PageId(next(self._working))
            made.working = tuple(StateSlot(group, 0, working) for group in self.state_groups)
            made.rolling = tuple(StateSlot(group, 0, rolling) for group in self.state_groups)
            made.snapshots = tuple(
                self.snapshot(made, group, page + 1)
                for group in self.state_groups
                for page in range(min(len(made.tables[group]), len(tokens) // self.page))
            )
        return made

    @property
    def state_groups(self) -> list[int]:
        return [group for group, spec in enumerate(self.pages.specs()) if spec.kind is GroupKind.STATE]

    def snapshot(self, sequence: PagedTokens, group: int, boundary: int) -> StateSlot:
        """Where the sequence's state behind that many pages is."""
        return StateSlot(group, boundary * self.page, PageId(sequence.tables[group][boundary - 1]))

    def restored(self, part: Part) -> Part:
        """Returns the part; its sequence begins from a snapshot if it is the first one."""
        sequence = part.sequence
        if sequence.start_len == NOT_STARTED:
            sequence.start_len = part.first
            boundary, rest = divmod(part.first, self.page)
            assert not (rest and self.state_groups), "a state begins where a snapshot is"
            if boundary:
                sequence.restore = tuple(self.snapshot(sequence, group, boundary) for group in self.state_groups)
        return part

    def batch(self, *parts: Part, num_decode: int | None = None) -> Batch:
        """One-token parts must come first; they count as decode rows unless told otherwise."""
        rows = [
            Row(cast(CoreSequence, part.sequence), part.first, part.end - part.first)
            for part in map(self.restored, parts)
        ]
        decode = sum(part.end - part.first == 1 for part in parts) if num_decode is None else num_decode
        return build_batch(rows, decode, self.pages.specs(), self.page)

    def run(self, *parts: Part) -> LaunchTokens:
        return self.runner.run(self.batch(*parts))

    def all_logits(self, *parts: Part, num_decode: int | None = None) -> torch.Tensor:
        """Logits of every computed token, packed: fp32 [num_tokens, vocab_size]."""
        batch = self.batch(*parts, num_decode=num_decode)
        rows = tuple(SampledRow(0, SamplingParams(), 0) for _ in range(batch.num_tokens))
        return self.runner.logits(replace(batch, logits_rows=array("i", range(batch.num_tokens)), sampled=rows))

    def chunked_logits(self, sequence: PagedTokens, chunk: int, start: int = 0) -> torch.Tensor:
        length = len(sequence.tokens)
        cuts = [*range(start, length, chunk), length]
        parts = [Part(sequence, first, end) for first, end in pairwise(cuts)]
        return torch.cat([self.all_logits(part) for part in parts])
