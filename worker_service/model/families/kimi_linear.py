"""Kimi Linear: Kimi Delta Attention in most layers, latent attention without positions in the others, experts.

A layer of the first kind has two states: the last columns that went into its convolution, and its heads' matrices.
"""

from __future__ import annotations

from typing import Any

from kernels.block_scan import MAX_DIM
from kernels.causal_conv import MAX_D_CONV
from kernels.route_experts import RoutingRule, Scoring
from worker_service.core.errors import ModelError
from worker_service.model.attention_specs import LatentSpec
from worker_service.model.families.common import DENSE, model_spec, read_activation
from worker_service.model.families.family import recurrent_family
from worker_service.model.families.qwen3_moe import read_dense
from worker_service.model.fields import Fields, first_of, flag, layer_types, number, one_of, whole
from worker_service.model.layer_weights import DenseWeights, KimiDeltaWeights, LayerWeights, Linear, MoeWeights
from worker_service.model.recurrent_specs import KimiDeltaSpec
from worker_service.model.spec import Activation, DenseSpec, LayerSpec, ModelSpec, MoeSpec, NormSpec
from worker_service.model.take_weights import (
    ExpertNames,
    stacked,
    take_dense,
    take_expert_matrices,
    take_latents,
    take_linear,
)
from worker_service.model.tensors import TensorSource

KIMI_LINEAR = "KimiLinearForCausalLM"
DEFAULTS: Fields = {
    "vocab_size": 163_840,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "moe_intermediate_size": 1024,
    "num_hidden_layers": 27,
    "num_attention_heads": 32,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "routed_scaling_factor": 2.446,
    "rms_norm_eps": 1e-5,
    "linear_num_heads": 32,
    "linear_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "eos_token_id": 163_586,
}
ATTENDS = {"full_attention": True, "linear_attention": False}
# The object of the published file that has sizes and layers of Kimi Delta Attention; transformers writes them apart.
LINEAR = "linear_attn_config"
LINEAR_NAMES = {
    "linear_num_heads": "num_heads",
    "linear_head_dim": "head_dim",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}
# Of later models that call themselves kimi_linear too.
NOT_SERVED = ("mla_use_output_gate", "attn_res_block_size", "routed_expert_hidden_size")
LINEAR_NOT_SERVED = ("gate_lower_bound", "use_full_rank_gate")


def read_spec(fields: Fields) -> ModelSpec:
    _refuse_what_is_not_served(fields)
    num_layers = whole(fields, "num_hidden_layers")
    latents, delta = _latents(fields), _delta(_linear_fields(fields))
    dense, experts = read_dense(fields), _experts(fields)
    kinds = zip(_attending(fields, num_layers), _dense_layers(fields, num_layers), strict=True)
    return model_spec(
        fields,
        layers=tuple(
            LayerSpec(latents if attends else delta, dense if is_dense else experts) for attends, is_dense in kinds
        ),
        norm=NormSpec(number(fields, "rms_norm_eps")),
        max_model_len=whole(fields, first_of(fields, "model_max_length", "max_position_embeddings"), 1_048_576),
        num_mtp_layers=whole(fields, "num_nextn_predict_layers", 0, least=0),
    )


def _refuse_what_is_not_served(fields: Fields) -> None:
    for name in ("mla_use_nope", "use_grouped_topk"):
        if not flag(fields, name, True):
            raise ModelError(name, "false is not supported; true is")
    for name in NOT_SERVED:
        if fields.get(name) not in (None, False):
            raise ModelError(name, f"{fields[name]!r} is not supported")
    one_of(fields, "moe_router_activation_func", {"sigmoid": True}, "sigmoid")
    whole(fields, "moe_layer_freq", 1, most=1)


def _linear_fields(fields: Fields) -> Fields:
    """Returns the object's fields under the names of those that stand apart, which count where it has none."""
    said = fields.get(LINEAR) or {}
    if not isinstance(said, dict):
        raise ModelError(LINEAR, f"must be an object, not {said!r}")
    for name in LINEAR_NOT_SERVED:
        if said.get(name) not in (None, False):
            raise ModelError(LINEAR, f"{name} {said[name]!r} is not supported")
    return {**fields, **{apart: said[name] for apart, name in LINEAR_NAMES.items() if name in said}}


def _delta(linear: Fields) -> KimiDeltaSpec:
    head_dim = whole(linear, "linear_head_dim", most=MAX_DIM)
    return KimiDeltaSpec(
        num_heads=whole(linear, "linear_num_heads"),
        head_dim=head_dim,
        rank=head_dim,
        width=whole(linear, "linear_conv_kernel_dim", least=2, most=MAX_D_CONV),
    )


def _attending(fields: Fields, num_layers: int) -> list[bool]:
    """Returns which layers have latent attention: by `layer_types`, else by the object's numbers, which count from 1,
    else every fourth one behind the first."""
    named = layer_types(fields, num_layers, ATTENDS)
    if named is not None:
        return named
    said = fields.get(LINEAR) or {}
    full, delta = said.get("full_attn_layers"), said.get("kda_layers")
    if full is None or delta is None:
        return [layer > 0 and layer % 4 == 0 for layer in range(num_layers)]
    if not isinstance(full, list) or not isinstance(delta, list) or not _are_all(full + delta, num_layers):
        raise ModelError(LINEAR, f"full_attn_layers and kda_layers must have each of the {num_layers} layers once")
    return [layer + 1 in full for layer in range(num_layers)]


def _are_all(numbers: list[Any], num_layers: int) -> bool:
    return all(type(one) is int for one in numbers) and sorted(numbers) == list(range(1, num_layers + 1))


def _dense_layers(fields: Fields, num_layers: int) -> list[bool]:
    """Returns which layers have no experts: by `mlp_layer_types`, else the first ones."""
    num_dense = whole(fields, "first_k_dense_replace", 1, least=0)
    return layer_types(fields, num_layers, DENSE, "mlp_layer_types") or [
        layer < num_dense for layer in range(num_layers)
    ]


def _latents(fields: Fields) -> LatentSpec:
    nope_dim, rope_dim = whole(fields, "qk_nope_head_dim"), whole(fields, "qk_rope_head_dim")
    if rope_dim % 2:
        raise ModelError("qk_rope_head_dim", f"must be even, not {rope_dim}")
    return LatentSpec(
        num_heads=whole(fields, "num_attention_heads"),
        q_rank=0 if fields.get("q_lora_rank") is None else whole(fields, "q_lora_rank"),
        latent_dim=whole(fields, "kv_lora_rank"),
        rope_dim=rope_dim,
        nope_dim=nope_dim,
        value_dim=whole(fields, "v_head_dim"),
        rope=None,
        scale=(nope_dim + rope_dim) ** -0.5,
        interleaved=False,
        bias=flag(fields, "attention_bias"),
    )


def _experts(fields: Fields) -> MoeSpec:
    inner = whole(fields, "moe_intermediate_size")
    activation = read_activation(fields, "hidden_act", (Activation.SILU,))
    num_shared = whole(fields, first_of(fields, "num_shared_experts", "n_shared_experts"), 1)
    return MoeSpec(
        num_experts=whole(fields, first_of(fields, "num_experts", "num_local_experts"), 256),
        intermediate_size=inner,
        rule=RoutingRule(
            top_k=whole(fields, first_of(fields, "num_experts_per_token", "num_experts_per_tok"), 8),
            scoring=Scoring.SIGMOID,
            renormalise=flag(fields, first_of(fields, "moe_renormalize", "norm_topk_prob"), True),
            scale=number(fields, "routed_scaling_factor"),
            num_groups=whole(fields, first_of(fields, "num_expert_group", "n_group"), 1),
            top_groups=whole(fields, "topk_group", 1),
            group_best=2,
        ),
        activation=activation,
        selection_bias=True,
        wide_router=True,
        shared=DenseSpec(inner * num_shared, activation),
    )


def take_layer(source: TensorSource, prefix: str, spec: ModelSpec, layer: LayerSpec) -> LayerWeights:
    hidden, mixer = spec.hidden_size, layer.mixer
    assert isinstance(mixer, LatentSpec | KimiDeltaSpec)
    return LayerWeights(
        mixer_norm=source.take(f"{prefix}.input_layernorm.weight", hidden),
        mixer=(
            take_latents(source, f"{prefix}.self_attn", mixer, hidden)
            if isinstance(mixer, LatentSpec)
            else _take_delta(source, f"{prefix}.self_attn", mixer, hidden)
        ),
        mlp_norm=source.take(f"{prefix}.post_attention_layernorm.weight", hidden),
        mlp=_take_mlp(source, prefix, layer.mlp, hidden),
    )


def _take_delta(source: TensorSource, prefix: str, spec: KimiDeltaSpec, hidden: int) -> KimiDeltaWeights:
    size, rank, heads = spec.inner_size, spec.rank, spec.num_heads
    rows = {"q_proj": size, "k_proj": size, "v_proj": size, "f_a_proj": rank, "g_a_proj": rank, "b_proj": heads}
    taps = [source.take(f"{prefix}.{part}_conv1d.weight", size, 1, spec.width) for part in "qkv"]
    decay_up, gate_up = (Linear(source.take(f"{prefix}.{part}_b_proj.weight", size, rank), None) for part in ("f", "g"))
    return KimiDeltaWeights(
        inner=take_linear(source, [f"{prefix}.{name}" for name in rows], list(rows.values()), hidden, bias=False),
        taps=stacked(taps).view(spec.channels, spec.width),
        decay_up=decay_up,
        a_log=source.take(f"{prefix}.A_log", 1, 1, heads, 1, wide=True).view(heads),
        decay_bias=source.take(f"{prefix}.dt_bias", size, wide=True),
        gate_up=gate_up,
        norm=source.take(f"{prefix}.o_norm.weight", spec.head_dim),
        output=take_linear(source, [f"{prefix}.o_proj"], [hidden], size, bias=False),
    )


def _take_mlp(
    source: TensorSource, prefix: str, spec: DenseSpec | MoeSpec | None, hidden: int
) -> DenseWeights | MoeWeights:
    experts = f"{prefix}.block_sparse_moe"
    if isinstance(spec, DenseSpec):
        # transformers saves the one under the other's name.
        is_renamed = source.holds(f"{experts}.gate_proj.weight")
        return take_dense(source, experts if is_renamed else f"{prefix}.mlp", spec, hidden)
    assert spec is not None and spec.shared is not None
    count, name, shared = spec.num_experts, f"{experts}.experts.{{expert}}", f"{experts}.shared_experts"
    router = Linear(source.take(f"{experts}.gate.weight", count, hidden, wide=True), None)
    gate_up, down, fused_shared = take_expert_matrices(
        source,
        spec,
        ExpertNames((f"{name}.w1.weight", f"{name}.w3.weight"), f"{name}.w2.weight"),
        ExpertNames((f"{shared}.gate_proj.weight", f"{shared}.up_proj.weight"), f"{shared}.down_proj.weight"),
        hidden,
    )
    return MoeWeights(
        router=router,
        gate_up=gate_up,
        down=down,
        selection_bias=source.take(f"{experts}.gate.e_score_correction_bias", count, wide=True),
        shared=None if fused_shared else take_dense(source, shared, spec.shared, hidden),
        fused_shared=fused_shared,
    )


FAMILY = recurrent_family(KIMI_LINEAR, read_spec, take_layer, DEFAULTS)
