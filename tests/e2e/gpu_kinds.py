"""Random models of few layers whose heads and latents have published sizes.

A GPU runs them with the kernels that the published models take.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tests.e2e.kinds import KINDS, Kind

HIDDEN = 256
# Matrices of random weights keep the size of what they multiply, about, with a spread of one over its square root.
SPREAD = 0.08


class GpuKind(NamedTuple):
    """A kind, the tokens of its prompts, more than its sparse attention chooses from at once, and settings of its
    workers."""

    kind: Kind
    prompt_tokens: int
    settings: dict[str, object]


def _published(name: str, page: int, prompt_tokens: int, **fields: Any) -> GpuKind:
    small = KINDS[name]
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "max_position_embeddings": 32_768}
    kind = Kind(small.family, small.groups, {**small.fields, **sizes, **fields}, SPREAD, page)
    return GpuKind(kind, prompt_tokens, {})


_LATENTS = {
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "head_dim": 64,
}
_INDEXER = {"index_n_heads": 64, "index_head_dim": 128, "index_topk": 512}

GPU_KINDS = {
    "deepseek-v3": _published("deepseek-v3", 64, 4600, **_LATENTS),
    "deepseek-v32": _published("deepseek-v32", 64, 4600, **_LATENTS, **_INDEXER),
    # Its indexer chooses among a quarter as many entries as there are tokens.
    "deepseek-v4": _published(
        "deepseek-v4",
        128,
        18_000,
        **_INDEXER,
        num_attention_heads=64,
        head_dim=512,
        partial_rotary_factor=0.125,
        q_lora_rank=128,
        o_groups=8,
        o_lora_rank=64,
        sliding_window=128,
    ),
    "gpt-oss": _published(
        "gpt-oss", 16, 4600, head_dim=64, num_attention_heads=16, num_key_value_heads=2, sliding_window=128
    ),
    "gemma3": _published(
        "gemma3", 16, 4600, head_dim=256, num_attention_heads=8, num_key_value_heads=4, sliding_window=512
    ),
}
# Prompts that are captured make their keys and values in three chunks.
GPU_KINDS["deepseek-v3-chunks"] = GPU_KINDS["deepseek-v3"]._replace(settings={"latent_chunk_tokens": 2048})
# Index keys as the published system stores them, and queries in fp8 with them.
GPU_KINDS["deepseek-v32-fp8-keys"] = GPU_KINDS["deepseek-v32"]._replace(settings={"index_key_dtype": "fp8_e4m3"})
