"""What docs/invariance.md promises, for each kind of layers: the same bits for any cut, batch, page order and source.

On a GPU in bf16 and sizes that the Hopper kernels take; on a CPU in fp32 and small.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.examples import thorough
from tests.worker_service.cuda_device import NEEDS_CUDA, prepared_cuda
from tests.worker_service.invariance_rig import VOCAB, Scale, World, check_decoding, check_prefill, check_repeats
from tests.worker_service.model_kit import page_of
from tests.worker_service.stored_models import AS_FP8, AS_MXFP4
from worker_service.model.config import parse_model_spec
from worker_service.model.gemm_dispatch import Invariance

CPU, CUDA = torch.device("cpu"), prepared_cuda()

SCANS = ("gated-delta", "kimi-delta", "mamba2")
# Of kinds whose pages are four or eight times as long, so that as many prompts need more of the pool.
GPU_SCALES = {
    **dict.fromkeys(SCANS, Scale(pool_tokens=32_768)),
    # The longer ones have more entries than are chosen, and a list of keys that is cut into pieces.
    "compressed": Scale(pool_tokens=65_536, lengths=(2, 130, 900, 1_400)),
}
CPU_SCALES = {
    **dict.fromkeys(SCANS, Scale(pool_tokens=16_384, lengths=(75, 150, 200))),
    "compressed": Scale(pool_tokens=32_768, lengths=(75, 150, 300)),
}
GPU_CASES = 6
CPU_CASES = (0, thorough(1))
GPU_REPEATS, CPU_REPEATS = 150, 2
SIZES: dict[str, Any] = {
    "dtype": "bfloat16",
    "vocab_size": VOCAB,
    "num_hidden_layers": 4,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
LARGE = {"hidden_size": 1024, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 2}
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
# What differs from the sizes, by kind: everywhere, on a GPU, on a CPU.
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "experts": (
        {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2},
        {"head_dim": 128},
        {"head_dim": 16},
    ),
    "windows-sinks": (
        {"architectures": ["GptOssForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 4},
        {"head_dim": 64, "sliding_window": 128},
        {"head_dim": 16, "sliding_window": 20},
    ),
    "two-ropes": (
        {"architectures": ["Gemma3ForCausalLM"], "sliding_window_pattern": 3, "tie_word_embeddings": True},
        {"head_dim": 256, "sliding_window": 256},
        {"head_dim": 16, "sliding_window": 20, "query_pre_attn_scalar": 16},
    ),
    "softcap": (
        {"architectures": ["Gemma2ForCausalLM"]},
        {"head_dim": 256, "sliding_window": 256},
        {"head_dim": 16, "sliding_window": 20, "query_pre_attn_scalar": 16},
    ),
    # The state of a convolution is what went into it, so no cut and no grid changes a bit.
    "states": (
        {"architectures": ["Lfm2ForCausalLM"], "layer_types": ["conv", "conv", "full_attention", "conv"]},
        {"block_ff_dim": 1536, "conv_L_cache": 3},
        {"block_ff_dim": 96, "block_auto_adjust_ff_dim": False, "conv_L_cache": 4},
    ),
    # Scans go in blocks of 64 positions: their pages and their cuts lie on that grid.
    "gated-delta": (
        {
            "architectures": ["Qwen3_5ForCausalLM"],
            "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        },
        {"head_dim": 128, "linear_key_head_dim": 128, "linear_value_head_dim": 128},
        {"head_dim": 16, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    ),
    # Beside latents whose keys do not turn.
    "kimi-delta": (
        {
            "architectures": ["KimiLinearForCausalLM"],
            "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
            "linear_num_heads": 4,
            "num_experts": 16,
            "num_experts_per_token": 4,
        },
        {"num_attention_heads": 16, "linear_head_dim": 128, "moe_intermediate_size": 512},
        {
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "linear_head_dim": 16,
            "moe_intermediate_size": 32,
        },
    ),
    "mamba2": (
        {"architectures": ["BambaForCausalLM"], "attn_layer_indices": [1]},
        {"mamba_n_heads": 32, "mamba_n_groups": 1, "mamba_d_state": 128},
        {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 16},
    ),
    "latents": (
        {
            "architectures": ["DeepseekV3ForCausalLM"],
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
        },
        {"num_attention_heads": 16, "q_lora_rank": 512, "moe_intermediate_size": 512},
        {
            "q_lora_rank": 48,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "moe_intermediate_size": 32,
        },
    ),
    # Fewer tokens are chosen than a sequence has.
    "sparse": (
        {
            "architectures": ["DeepseekV32ForCausalLM"],
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
        },
        {"num_attention_heads": 16, "q_lora_rank": 512, "moe_intermediate_size": 512, "index_topk": 64},
        {
            "q_lora_rank": 48,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "moe_intermediate_size": 32,
            "index_n_heads": 16,
            "index_head_dim": 16,
            "index_topk": 24,
        },
    ),
    # A window, entries of 4 tokens of which some are chosen, and entries of 128; experts by token in the first layer.
    "compressed": (
        {
            "architectures": ["DeepseekV4ForCausalLM"],
            "num_key_value_heads": 1,
            "layer_types": [
                "sliding_attention",
                "compressed_sparse_attention",
                "heavily_compressed_attention",
                "compressed_sparse_attention",
            ],
            "num_hash_layers": 1,
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
        },
        {
            "num_attention_heads": 32,
            "head_dim": 256,
            "q_lora_rank": 512,
            "o_lora_rank": 128,
            "moe_intermediate_size": 512,
            "index_topk": 200,
        },
        {
            "head_dim": 32,
            "qk_rope_head_dim": 8,
            "q_lora_rank": 24,
            "o_groups": 2,
            "o_lora_rank": 16,
            "moe_intermediate_size": 32,
            "index_n_heads": 16,
            "index_head_dim": 16,
            "index_topk": 7,
        },
    ),
}


# On a GPU also with experts as checkpoints store them.
STORED = [("latents", AS_FP8), ("windows-sinks", AS_MXFP4), ("compressed", AS_MXFP4)]


@pytest.fixture(
    scope="module",
    params=[*((kind, None) for kind in KINDS), *STORED],
    ids=lambda param: f"{param[0]}-{param[1].made.__name__}" if param[1] else param[0],
)
def gpu_world(request: pytest.FixtureRequest) -> Iterator[World]:
    kind, experts = request.param
    shared, large, _ = KINDS[kind]
    fields = {**SIZES, **LARGE, **shared, **large}
    page_tokens, scale = page_of(parse_model_spec(fields)), GPU_SCALES.get(kind, Scale())
    yield World(fields, page_tokens, Invariance.BATCH, CUDA, torch.bfloat16, scale, experts=experts)
    torch.cuda.empty_cache()


@pytest.fixture(scope="module", params=list(KINDS))
def cpu_world(request: pytest.FixtureRequest) -> World:
    shared, _, small = KINDS[request.param]
    fields = {**SIZES, **SMALL, **shared, **small}
    scale = CPU_SCALES.get(request.param, Scale(pool_tokens=4096, lengths=(17, 75, 100)))
    return World(fields, page_of(parse_model_spec(fields)), Invariance.BATCH, CPU, torch.float32, scale)


class TestGpu:
    pytestmark = NEEDS_CUDA

    @pytest.mark.parametrize("seed", range(GPU_CASES))
    def test_prefill_gives_the_cold_logits(self, gpu_world: World, seed: int) -> None:
        check_prefill(gpu_world, seed)

    @pytest.mark.parametrize("seed", range(GPU_CASES))
    def test_decoding_gives_the_same_logits_in_any_company(self, gpu_world: World, seed: int) -> None:
        check_decoding(gpu_world, seed)

    def test_a_launch_has_the_same_bits_each_time(self, gpu_world: World) -> None:
        check_repeats(gpu_world, GPU_REPEATS)


class TestCpu:
    @pytest.mark.parametrize("seed", CPU_CASES)
    def test_prefill_gives_the_cold_logits(self, cpu_world: World, seed: int) -> None:
        check_prefill(cpu_world, seed)

    @pytest.mark.parametrize("seed", CPU_CASES)
    def test_decoding_gives_the_same_logits_in_any_company(self, cpu_world: World, seed: int) -> None:
        check_decoding(cpu_world, seed)

    def test_a_launch_has_the_same_bits_each_time(self, cpu_world: World) -> None:
        check_repeats(cpu_world, CPU_REPEATS)
