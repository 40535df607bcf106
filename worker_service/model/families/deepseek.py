"""DeepSeek V2 and V3 (R1 and Kimi K2 among them) and GLM-4.7-Flash: latent attention, experts, and a shared one."""

from __future__ import annotations

from kernels.route_experts import RoutingRule
from worker_service.core.errors import ModelError
from worker_service.model.attention_specs import LatentSpec
from worker_service.model.families import glm4_moe
from worker_service.model.families.common import (
    model_spec,
    read_activation,
    read_dense_layers,
    read_num_mtp_layers,
    read_positions,
)
from worker_service.model.families.family import Family
from worker_service.model.families.qwen3_moe import read_dense
from worker_service.model.fields import Fields, first_of, flag, number, one_of, whole
from worker_service.model.rope import yarn_mscale
from worker_service.model.spec import Activation, DenseSpec, LayerSpec, ModelSpec, MoeSpec, NormSpec
from worker_service.model.take_weights import take_layer

V2 = "DeepseekV2ForCausalLM"
V3 = "DeepseekV3ForCausalLM"
GLM4_LITE = "Glm4MoeLiteForCausalLM"
V2_DEFAULTS: Fields = {
    "q_lora_rank": 1536,
    "n_routed_experts": 64,
    "eos_token_id": 2,
    "num_nextn_predict_layers": 0,
}
V3_DEFAULTS: Fields = {
    "q_lora_rank": 1536,
    "n_routed_experts": 256,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "eos_token_id": 1,
}
GLM4_LITE_DEFAULTS: Fields = {
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 1.8,
    "eos_token_id": 1,
}


def read_v2(fields: Fields) -> ModelSpec:
    return _read_spec(fields, _v2_experts(fields), _first_layers(fields, 0), norm_eps=1e-6)


def read_v3(fields: Fields) -> ModelSpec:
    return _read_spec(fields, glm4_moe.read_experts(fields), _first_layers(fields, 3), norm_eps=1e-6)


def read_glm4_lite(fields: Fields) -> ModelSpec:
    dense = read_dense_layers(fields, whole(fields, "num_hidden_layers"))
    return _read_spec(fields, glm4_moe.read_experts(fields), dense, norm_eps=1e-5)


def _read_spec(fields: Fields, experts: MoeSpec, dense_layers: list[bool], norm_eps: float) -> ModelSpec:
    mixer, dense = read_latents(fields), read_dense(fields)
    return model_spec(
        fields,
        layers=tuple(LayerSpec(mixer, dense if is_dense else experts) for is_dense in dense_layers),
        norm=NormSpec(number(fields, "rms_norm_eps", norm_eps)),
        max_model_len=read_positions(fields).max_model_len,
        num_mtp_layers=read_num_mtp_layers(fields),
    )


def read_latents(fields: Fields) -> LatentSpec:
    """Returns the mixer of all layers. Scores of a YaRN rope have the square of its mscale in their scale."""
    rope = read_positions(fields).rope
    nope_dim, rope_dim = whole(fields, "qk_nope_head_dim", 128), whole(fields, "qk_rope_head_dim", 64)
    if rope_dim % 2:
        raise ModelError("qk_rope_head_dim", f"must be even for rotary embeddings, not {rope_dim}")
    return LatentSpec(
        num_heads=whole(fields, "num_attention_heads"),
        q_rank=0 if fields.get("q_lora_rank") is None else whole(fields, "q_lora_rank"),
        latent_dim=whole(fields, "kv_lora_rank", 512),
        rope_dim=rope_dim,
        nope_dim=nope_dim,
        value_dim=whole(fields, "v_head_dim", 128),
        rope=rope,
        scale=(nope_dim + rope_dim) ** -0.5 * yarn_mscale(rope) ** 2,
        interleaved=flag(fields, "rope_interleave", True),
        bias=flag(fields, "attention_bias"),
    )


def _first_layers(fields: Fields, default: int) -> list[bool]:
    """Returns which layers have no experts: the first ones."""
    num_dense = whole(fields, "first_k_dense_replace", default, least=0)
    return [layer < num_dense for layer in range(whole(fields, "num_hidden_layers"))]


def _v2_experts(fields: Fields) -> MoeSpec:
    inner = whole(fields, "moe_intermediate_size")
    activation = read_activation(fields, "hidden_act", (Activation.SILU,))
    num_shared = whole(fields, "n_shared_experts", 2, least=0)
    in_groups = one_of(fields, "topk_method", {"greedy": False, "group_limited_greedy": True}, "greedy")
    return MoeSpec(
        num_experts=whole(fields, first_of(fields, "n_routed_experts", "num_local_experts")),
        intermediate_size=inner,
        rule=RoutingRule(
            top_k=whole(fields, "num_experts_per_tok"),
            scale=number(fields, "routed_scaling_factor", 1.0),
            num_groups=whole(fields, "n_group", 1) if in_groups else 1,
            top_groups=whole(fields, "topk_group", 1) if in_groups else 1,
        ),
        activation=activation,
        wide_router=True,
        shared=DenseSpec(inner * num_shared, activation) if num_shared else None,
    )


FAMILY_V2 = Family((V2,), read_v2, take_layer, V2_DEFAULTS)
FAMILY_V3 = Family((V3,), read_v3, take_layer, V3_DEFAULTS)
FAMILY_GLM4_LITE = Family((GLM4_LITE,), read_glm4_lite, take_layer, GLM4_LITE_DEFAULTS)
