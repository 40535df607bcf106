"""GLM-4-MoE: rotary embeddings over a part of each head, experts chosen by biased sigmoid scores, and a shared one."""

from __future__ import annotations

from kernels.route_experts import RoutingRule, Scoring
from worker_service.model.attention_specs import AttentionSpec
from worker_service.model.families.common import (
    model_spec,
    read_activation,
    read_heads,
    read_num_mtp_layers,
    read_positions,
)
from worker_service.model.families.family import Family
from worker_service.model.families.qwen3_moe import read_dense
from worker_service.model.fields import Fields, first_of, flag, number, whole
from worker_service.model.rope_fields import rotary_dim
from worker_service.model.spec import Activation, DenseSpec, LayerSpec, ModelSpec, MoeSpec, NormSpec
from worker_service.model.take_weights import take_layer

GLM4_MOE = "Glm4MoeForCausalLM"
DEFAULTS: Fields = {"num_key_value_heads": 8, "partial_rotary_factor": 0.5}


def read_spec(fields: Fields) -> ModelSpec:
    heads = read_heads(fields)
    positions = read_positions(fields)
    mixer = AttentionSpec(
        *heads,
        rope=positions.rope,
        rotary_dim=rotary_dim(fields, heads.head_dim),
        qk_norm=flag(fields, "use_qk_norm"),
        qkv_bias=flag(fields, "attention_bias"),
    )
    dense, experts = read_dense(fields), read_experts(fields)
    num_dense = whole(fields, "first_k_dense_replace", 1, least=0)
    return model_spec(
        fields,
        layers=tuple(
            LayerSpec(mixer, dense if layer < num_dense else experts)
            for layer in range(whole(fields, "num_hidden_layers"))
        ),
        norm=NormSpec(number(fields, "rms_norm_eps", 1e-5)),
        max_model_len=positions.max_model_len,
        num_mtp_layers=read_num_mtp_layers(fields),
    )


def read_experts(fields: Fields) -> MoeSpec:
    """Returns the experts of a layer; DeepSeek V3 chooses by the same rule."""
    inner = whole(fields, "moe_intermediate_size")
    activation = read_activation(fields, "hidden_act", (Activation.SILU,))
    num_shared = whole(fields, "n_shared_experts", 1, least=0)
    return MoeSpec(
        num_experts=whole(fields, first_of(fields, "n_routed_experts", "num_local_experts")),
        intermediate_size=inner,
        rule=read_rule(fields, top_k=8),
        activation=activation,
        selection_bias=True,
        wide_router=True,
        shared=DenseSpec(inner * num_shared, activation) if num_shared else None,
    )


def read_rule(fields: Fields, top_k: int) -> RoutingRule:
    """Returns the choice of experts by biased sigmoid scores, among the best groups; `top_k` where no field says it."""
    return RoutingRule(
        top_k=whole(fields, "num_experts_per_tok", top_k),
        scoring=Scoring.SIGMOID,
        renormalise=flag(fields, "norm_topk_prob", True),
        scale=number(fields, "routed_scaling_factor", 1.0),
        num_groups=whole(fields, "n_group", 1),
        top_groups=whole(fields, "topk_group", 1),
        group_best=2,
    )


# Behind the last layer lie those that predict tokens ahead.
FAMILY = Family((GLM4_MOE,), read_spec, take_layer, DEFAULTS)
