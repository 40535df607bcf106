"""Qwen3-Next and Qwen3.5, dense and with experts: the gated delta rule in most layers, gated attention in the others.

A layer with the rule has two states: the last columns that went into its convolution, and its heads' matrices.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.block_scan import MAX_DIM
from kernels.causal_conv import MAX_D_CONV
from kernels.route_experts import RoutingRule
from worker_service.core.errors import ModelError
from worker_service.model.attention_specs import AttentionSpec
from worker_service.model.families.common import (
    model_spec,
    read_activation,
    read_heads,
    read_positions,
    usual_attention,
)
from worker_service.model.families.family import FULL_AND_STATE, Family
from worker_service.model.families.qwen3_moe import expert_layers, read_dense
from worker_service.model.fields import Fields, flag, layer_types, number, one_of, whole
from worker_service.model.layer_weights import DenseWeights, GatedDeltaWeights, LayerWeights, Linear, MoeWeights
from worker_service.model.recurrent_specs import GatedDeltaSpec
from worker_service.model.rope_fields import rotary_dim
from worker_service.model.spec import (
    STATE_PAGE_TOKENS,
    Activation,
    DenseSpec,
    LayerSpec,
    ModelSpec,
    MoeSpec,
    NormKind,
    NormSpec,
)
from worker_service.model.take_weights import stacked, take_dense, take_linear, take_mixer, take_moe
from worker_service.model.tensors import TensorSource

QWEN3_NEXT = "Qwen3NextForCausalLM"
QWEN3_5 = "Qwen3_5ForCausalLM"
QWEN3_5_MOE = "Qwen3_5MoeForCausalLM"
# Folders with a vision tower beside the decoder.
QWEN3_5_WRAPPER = "Qwen3_5ForConditionalGeneration"
QWEN3_5_MOE_WRAPPER = "Qwen3_5MoeForConditionalGeneration"
DEFAULTS: Fields = {
    "hidden_act": "silu",
    "num_attention_heads": 16,
    "head_dim": 256,
    "max_position_embeddings": 32_768,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
NEXT_DEFAULTS: Fields = {
    **DEFAULTS,
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 10,
    "num_experts": 512,
    "norm_topk_prob": True,
}
DENSE_DEFAULTS: Fields = {
    **DEFAULTS,
    "vocab_size": 248_320,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_key_value_heads": 4,
}
MOE_DEFAULTS: Fields = {
    **DEFAULTS,
    "vocab_size": 248_320,
    "hidden_size": 2048,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 8,
    "num_experts": 256,
}
ROTARY_SHARE = 0.25
ATTENDS = {"full_attention": True, "linear_attention": False}
GATES = {"swish": True, "silu": True}


def read_next(fields: Fields) -> ModelSpec:
    experts, dense = _experts(fields, flag(fields, "norm_topk_prob", True)), read_dense(fields)
    return _read_spec(fields, [experts if has_experts else dense for has_experts in expert_layers(fields)])


def read_dense_model(fields: Fields) -> ModelSpec:
    return _read_spec(fields, [read_dense(fields)] * whole(fields, "num_hidden_layers"))


def read_moe(fields: Fields) -> ModelSpec:
    return _read_spec(fields, [_experts(fields, renormalise=True)] * whole(fields, "num_hidden_layers"))


def _read_spec(fields: Fields, mlps: list[DenseSpec] | list[MoeSpec] | list[DenseSpec | MoeSpec]) -> ModelSpec:
    attention, delta = _attention(fields), _gated_delta(fields)
    return model_spec(
        fields,
        layers=tuple(
            LayerSpec(attention if attends else delta, mlp)
            for attends, mlp in zip(_attending(fields), mlps, strict=True)
        ),
        norm=NormSpec(number(fields, "rms_norm_eps", 1e-6), NormKind.RMS_PLUS_ONE),
        max_model_len=read_positions(fields).max_model_len,
    )


def _attention(fields: Fields) -> AttentionSpec:
    if not flag(fields, "attn_output_gate", True):
        raise ModelError("attn_output_gate", "false is not supported; true is")
    rotary = _rotary_dim(fields, read_heads(fields).head_dim)
    return usual_attention(fields, read_positions(fields).rope, rotary_dim=rotary, qk_norm=True, output_gate=True)


def _rotary_dim(fields: Fields, head_dim: int) -> int:
    return rotary_dim({"partial_rotary_factor": ROTARY_SHARE, **fields}, head_dim)


def _gated_delta(fields: Fields) -> GatedDeltaSpec:
    # Of the heads' outputs; the sigmoid of attention's is another one.
    one_of(fields, "output_gate_type", GATES, "swish")
    spec = GatedDeltaSpec(
        num_heads=whole(fields, "linear_num_value_heads"),
        num_k_heads=whole(fields, "linear_num_key_heads"),
        key_dim=whole(fields, "linear_key_head_dim", most=MAX_DIM),
        value_dim=whole(fields, "linear_value_head_dim", most=MAX_DIM),
        width=whole(fields, "linear_conv_kernel_dim", least=2, most=MAX_D_CONV),
    )
    if spec.num_heads % spec.num_k_heads:
        raise ModelError(
            "linear_num_key_heads", f"{spec.num_k_heads} does not divide linear_num_value_heads {spec.num_heads}"
        )
    return spec


def _attending(fields: Fields) -> list[bool]:
    """Returns which layers have attention: by `layer_types`, else every `full_attention_interval`-th one."""
    num_layers, interval = whole(fields, "num_hidden_layers"), whole(fields, "full_attention_interval", 4)
    default = [(layer + 1) % interval == 0 for layer in range(num_layers)]
    return layer_types(fields, num_layers, ATTENDS) or default


def _experts(fields: Fields, renormalise: bool) -> MoeSpec:
    activation = read_activation(fields, "hidden_act", (Activation.SILU,))
    return MoeSpec(
        num_experts=whole(fields, "num_experts"),
        intermediate_size=whole(fields, "moe_intermediate_size"),
        rule=RoutingRule(top_k=whole(fields, "num_experts_per_tok"), renormalise=renormalise),
        activation=activation,
        shared=DenseSpec(whole(fields, "shared_expert_intermediate_size"), activation),
        shared_gate=True,
    )


def take_next_layer(source: TensorSource, prefix: str, spec: ModelSpec, layer: LayerSpec) -> LayerWeights:
    return _take_layer(source, prefix, spec, layer, _take_by_key_head)


def take_layer(source: TensorSource, prefix: str, spec: ModelSpec, layer: LayerSpec) -> LayerWeights:
    return _take_layer(source, prefix, spec, layer, _take_apart)


TakeInner = Callable[[TensorSource, str, GatedDeltaSpec, int], Linear]


def _take_layer(
    source: TensorSource, prefix: str, spec: ModelSpec, layer: LayerSpec, take_inner: TakeInner
) -> LayerWeights:
    hidden, mixer, mlp = spec.hidden_size, layer.mixer, layer.mlp
    assert mlp is not None
    return LayerWeights(
        mixer_norm=source.take(f"{prefix}.input_layernorm.weight", hidden),
        mixer=(
            _take_delta(source, f"{prefix}.linear_attn", mixer, hidden, take_inner)
            if isinstance(mixer, GatedDeltaSpec)
            else take_mixer(source, f"{prefix}.self_attn", mixer, hidden)
        ),
        mlp_norm=source.take(f"{prefix}.post_attention_layernorm.weight", hidden),
        mlp=_take_mlp(source, f"{prefix}.mlp", mlp, hidden),
    )


def _take_mlp(source: TensorSource, prefix: str, spec: DenseSpec | MoeSpec, hidden: int) -> DenseWeights | MoeWeights:
    if isinstance(spec, MoeSpec):
        return take_moe(source, prefix, spec, hidden, shared="shared_expert")
    return take_dense(source, prefix, spec, hidden)


def _take_delta(
    source: TensorSource, prefix: str, spec: GatedDeltaSpec, hidden: int, take_inner: TakeInner
) -> GatedDeltaWeights:
    channels = spec.channels
    return GatedDeltaWeights(
        inner=take_inner(source, prefix, spec, hidden),
        taps=source.take(f"{prefix}.conv1d.weight", channels, 1, spec.width).view(channels, spec.width),
        a_log=source.take(f"{prefix}.A_log", spec.num_heads, wide=True),
        decay_bias=source.take(f"{prefix}.dt_bias", spec.num_heads, wide=True),
        norm=source.take(f"{prefix}.norm.weight", spec.value_dim),
        output=take_linear(source, [f"{prefix}.out_proj"], [hidden], spec.num_heads * spec.value_dim, bias=False),
    )


def _take_apart(source: TensorSource, prefix: str, spec: GatedDeltaSpec, hidden: int) -> Linear:
    names = [f"{prefix}.in_proj_{part}" for part in ("qkv", "z", "b", "a")]
    rows = [spec.channels, spec.num_heads * spec.value_dim, spec.num_heads, spec.num_heads]
    return take_linear(source, names, rows, hidden, bias=False)


def _take_by_key_head(source: TensorSource, prefix: str, spec: GatedDeltaSpec, hidden: int) -> Linear:
    """Returns the same of a file in which each head of keys has its query, key, values and gates together."""
    k_heads, group = spec.num_k_heads, spec.num_heads // spec.num_k_heads
    of_head = [spec.key_dim, spec.key_dim, group * spec.value_dim, group * spec.value_dim]
    qkvz = source.take(f"{prefix}.in_proj_qkvz.weight", k_heads * sum(of_head), hidden)
    ba = source.take(f"{prefix}.in_proj_ba.weight", 2 * spec.num_heads, hidden)
    parts = [
        *torch.split(qkvz.view(k_heads, -1, hidden), of_head, dim=1),
        *torch.split(ba.view(k_heads, -1, hidden), group, dim=1),
    ]
    return Linear(stacked([part.reshape(-1, hidden) for part in parts]), None)


# Layers that predict tokens ahead, and the tower.
IGNORED = ("mtp.", "model.visual.")
ROOTS = ("model.", "model.language_model.")
FAMILY_NEXT = Family(
    (QWEN3_NEXT,),
    read_next,
    take_next_layer,
    NEXT_DEFAULTS,
    ignored=IGNORED,
    kinds=FULL_AND_STATE,
    page_tokens=STATE_PAGE_TOKENS,
)
FAMILY_DENSE = Family(
    (QWEN3_5, QWEN3_5_WRAPPER),
    read_dense_model,
    take_layer,
    DENSE_DEFAULTS,
    roots=ROOTS,
    ignored=IGNORED,
    kinds=FULL_AND_STATE,
    page_tokens=STATE_PAGE_TOKENS,
)
FAMILY_MOE = Family(
    (QWEN3_5_MOE, QWEN3_5_MOE_WRAPPER),
    read_moe,
    take_layer,
    MOE_DEFAULTS,
    roots=ROOTS,
    ignored=IGNORED,
    kinds=FULL_AND_STATE,
    page_tokens=STATE_PAGE_TOKENS,
)
