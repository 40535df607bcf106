"""Nemotron-H: each layer is one branch, Mamba2, attention without positions, an MLP or experts; these have no gate."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from kernels.causal_conv import MAX_D_CONV
from worker_service.core.errors import ModelError
from worker_service.model.attention_specs import AttentionSpec
from worker_service.model.families.common import model_spec, read_heads
from worker_service.model.families.family import recurrent_family
from worker_service.model.families.glm4_moe import read_rule
from worker_service.model.families.mamba2 import read_step_limit, take_mamba2
from worker_service.model.fields import Fields, first_of, flag, number, one_of, whole
from worker_service.model.layer_weights import LayerWeights, MoeWeights
from worker_service.model.recurrent_specs import Mamba2Spec
from worker_service.model.spec import Activation, DenseSpec, LayerSpec, ModelSpec, MoeSpec, NormSpec
from worker_service.model.take_weights import take_attention, take_linear, take_mlp, take_moe
from worker_service.model.tensors import TensorSource

NEMOTRON_H = "NemotronHForCausalLM"
DEFAULTS: Fields = {
    "vocab_size": 131_072,
    "hidden_size": 4096,
    "intermediate_size": 21_504,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "eos_token_id": 2,
}
# By letter and by name, in files of today and of before.
KINDS = {
    "M": "mamba",
    "*": "attention",
    "-": "mlp",
    "E": "moe",
    "mamba": "mamba",
    "linear_attention": "mamba",
    "attention": "attention",
    "full_attention": "attention",
    "mlp": "mlp",
    "moe": "moe",
}
DEFAULT_LAYERS = "ME*-"
RELU2 = {"relu2": Activation.RELU2}


class _Branches(NamedTuple):
    mamba: LayerSpec
    attention: LayerSpec
    mlp: LayerSpec
    moe: LayerSpec


def read_spec(fields: Fields) -> ModelSpec:
    bias = flag(fields, "attention_bias")
    heads = read_heads(fields)
    attention = AttentionSpec(*heads, rope=None, rotary_dim=heads.head_dim, qkv_bias=bias, output_bias=bias)
    activation: Activation = one_of(fields, "mlp_hidden_act", RELU2, "relu2")
    mlp = DenseSpec(whole(fields, "intermediate_size"), activation, bias=flag(fields, "mlp_bias"))
    branches = _Branches(
        LayerSpec(_read_mamba2(fields), None),
        LayerSpec(attention, None),
        LayerSpec(None, mlp),
        LayerSpec(None, _read_experts(fields, mlp)),
    )
    return model_spec(
        fields,
        layers=tuple(getattr(branches, kind) for kind in _kinds(fields)),
        norm=NormSpec(number(fields, "layer_norm_epsilon", 1e-5)),
        max_model_len=whole(fields, "max_position_embeddings"),
    )


def _kinds(fields: Fields) -> list[str]:
    """Returns the kind of each layer: by a list of names, else by a pattern of letters."""
    name = next(
        (name for name in ("layers_block_type", "layer_types") if fields.get(name) is not None),
        "hybrid_override_pattern",
    )
    said = fields.get(name) or DEFAULT_LAYERS
    if not isinstance(said, list | str) or not all(isinstance(kind, str) and kind in KINDS for kind in said):
        raise ModelError(name, f"must say {', '.join(KINDS)} for each layer, not {said!r}")
    return [KINDS[kind] for kind in said]


def _read_mamba2(fields: Fields) -> Mamba2Spec:
    """Reads this family's names, or those of older files. `time_step_limit` bounds steps: `time_step_min` and `_max`
    are for training."""
    num_heads = whole(fields, "mamba_num_heads", 128)
    num_groups = whole(fields, first_of(fields, "mamba_n_groups", "n_groups"), 8)
    if num_heads % num_groups:
        raise ModelError("n_groups", f"{num_groups} does not divide mamba_num_heads {num_heads}")
    one_of(fields, "mamba_hidden_act", {"silu": Activation.SILU}, "silu")
    least, most = read_step_limit(fields, first_of(fields, "mamba_dt_limit", "time_step_limit"))
    bias = flag(fields, "use_bias")
    return Mamba2Spec(
        num_heads=num_heads,
        head_dim=whole(fields, "mamba_head_dim", 64),
        num_groups=num_groups,
        d_state=whole(fields, "ssm_state_size", 128),
        width=whole(fields, first_of(fields, "mamba_d_conv", "conv_kernel"), 4, least=2, most=MAX_D_CONV),
        conv_bias=flag(fields, first_of(fields, "mamba_conv_bias", "use_conv_bias"), True),
        inner_bias=bias,
        output_bias=bias,
        least_step=least,
        most_step=most,
        norm_groups=num_groups,
    )


def _read_experts(fields: Fields, mlp: DenseSpec) -> MoeSpec:
    """Returns the experts of a layer, beside which all tokens go through an MLP as `mlp` is, of another size."""
    return MoeSpec(
        num_experts=whole(fields, first_of(fields, "n_routed_experts", "num_local_experts"), 8),
        intermediate_size=whole(fields, "moe_intermediate_size", 7688),
        rule=read_rule(fields, top_k=2),
        activation=mlp.activation,
        selection_bias=True,
        wide_router=True,
        shared=replace(mlp, intermediate_size=whole(fields, "moe_shared_expert_intermediate_size", 7688)),
        latent_size=0 if fields.get("moe_latent_size") is None else whole(fields, "moe_latent_size"),
    )


def take_layer(source: TensorSource, prefix: str, spec: ModelSpec, layer: LayerSpec) -> LayerWeights:
    hidden, mixer, mlp, branch = spec.hidden_size, layer.mixer, layer.mlp, f"{prefix}.mixer"
    norm = source.take(f"{prefix}.norm.weight", hidden)
    if isinstance(mixer, Mamba2Spec):
        return LayerWeights(norm, take_mamba2(source, branch, mixer, hidden), None)
    if isinstance(mixer, AttentionSpec):
        return LayerWeights(norm, take_attention(source, branch, mixer, hidden), None)
    if isinstance(mlp, MoeSpec):
        return LayerWeights(norm, None, _take_moe(source, branch, mlp, hidden))
    return LayerWeights(norm, None, take_mlp(source, branch, mlp, hidden))


def _take_moe(source: TensorSource, prefix: str, spec: MoeSpec, hidden: int) -> MoeWeights:
    weights = take_moe(source, prefix, spec, hidden)
    if not spec.latent_size:
        return weights
    bias = spec.shared is not None and spec.shared.bias
    given = take_linear(source, [f"{prefix}.fc1_latent_proj"], [spec.latent_size], hidden, bias=bias)
    back = take_linear(source, [f"{prefix}.fc2_latent_proj"], [hidden], spec.latent_size, bias=bias)
    return replace(weights, latents=(given, back))


# Behind the last layer lie those that predict tokens ahead, under a root of their own.
FAMILY = recurrent_family(
    NEMOTRON_H,
    read_spec,
    take_layer,
    DEFAULTS,
    roots=("model.", "backbone."),
    ignored=("mtp.",),
    embeddings="embeddings",
    final_norm="norm_f",
)
