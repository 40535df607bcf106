"""config.json of models with Mamba2 layers, held against transformers' config classes as in test_family_configs.py."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kernels.route_experts import RoutingRule, Scoring
from tests.worker_service.published_mamba2 import PUBLISHED_MAMBA2
from tests.worker_service.test_family_configs import NAMES, UNREAD
from worker_service.core.errors import ModelError
from worker_service.model.attention_specs import AttentionSpec, RopeConfig, RopeKind
from worker_service.model.config import parse_model_spec
from worker_service.model.recurrent_specs import Mamba2Spec
from worker_service.model.spec import Activation, DenseSpec, LayerSpec, ModelSpec, MoeSpec, ParallelSpec

BAMBA, GRANITE, FALCON, NEMOTRON = PUBLISHED_MAMBA2
# Without the first field the second one contradicts what is left.
CONTRADICTIONS = {
    (GRANITE, "hidden_size"): "num_attention_heads",
    (GRANITE, "mamba_n_heads"): "mamba_d_head",
    **{(FALCON, name): "mamba_d_head" for name in ("mamba_d_ssm", "mamba_n_heads")},
    (GRANITE, "num_hidden_layers"): "layer_types",
}
UNREAD_HERE = (UNREAD - {"position_embedding_type"}) | {
    "chunk_size",
    "expand",
    "hidden_dropout",
    "init_method",
    "mamba_chunk_size",
    "mamba_ssm_cache_dtype",
    "mamba_use_mlp",
    "n_shared_experts",
    "normalization_function",
    "num_logits_to_keep",
    "rescale_prenorm_residual",
    "residual_in_fp32",
    "time_step_floor",
    "time_step_max",
    "time_step_min",
    "use_mamba_kernels",
}
UNREAD_BY = {
    FALCON: {"attn_layer_indices", "mamba_expand"},
    # Its projections' biases are `use_bias`, its layers as many as the pattern has.
    NEMOTRON: {"mamba_proj_bias", "num_hidden_layers", "sliding_window"},
}
Facts = tuple[Any, ...]


def facts_of_spec(spec: ModelSpec) -> Facts:
    sizes = (spec.vocab_size, spec.hidden_size, spec.max_model_len, spec.norm.eps)
    ends = (spec.tied_embeddings, spec.eos_token_ids, spec.embedding_scale, spec.logits_scale)
    return (*sizes, *ends, spec.layers)


def facts_of_transformers(fields: dict[str, Any]) -> Facts:
    given = {name: value for name, value in fields.items() if name != "model_type"}
    config: Any = CONFIG_MAPPING[fields["model_type"]](**given)
    eos = (config.eos_token_id,) if isinstance(config.eos_token_id, int) else ()
    eps = config.layer_norm_epsilon if config.model_type == "nemotron_h" else config.rms_norm_eps
    logits_scale = getattr(config, "lm_head_multiplier", 1.0) / getattr(config, "logits_scaling", 1.0)
    sizes = (config.vocab_size, config.hidden_size, config.max_position_embeddings, eps)
    ends = (config.tie_word_embeddings, eos, getattr(config, "embedding_multiplier", 1.0), logits_scale)
    layers = {"bamba": _bamba, "granitemoehybrid": _granite, "falcon_h1": _falcon, "nemotron_h": _nemotron}
    return (*sizes, *ends, tuple(layers[config.model_type](config)))


def _attention(config: Any, share: float | None, scale: float | None = None) -> AttentionSpec:
    """`share` None: nothing turns."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = None if share is None else RopeConfig(RopeKind.DEFAULT, config.rope_parameters["rope_theta"])
    return AttentionSpec(
        config.num_attention_heads,
        config.num_key_value_heads,
        head_dim,
        rope,
        int(head_dim * (share or 1.0)),
        scale=scale,
        qkv_bias=config.attention_bias,
        output_bias=config.attention_bias,
    )


def _mamba(config: Any, **more: Any) -> Mamba2Spec:
    bias = config.mamba_proj_bias
    least, most = config.time_step_limit
    usual = {"inner_bias": bias, "output_bias": bias, "least_step": least, "most_step": most}
    return Mamba2Spec(
        config.mamba_n_heads,
        config.mamba_d_head,
        config.mamba_n_groups,
        config.mamba_d_state,
        config.mamba_d_conv,
        config.mamba_conv_bias,
        **{**usual, **more},
    )


def _bamba(config: Any) -> list[LayerSpec]:
    mlp = DenseSpec(config.intermediate_size, bias=config.mlp_bias)
    share = config.rope_parameters["partial_rotary_factor"]
    mixers = {"full_attention": _attention(config, share), "linear_attention": _mamba(config)}
    return [LayerSpec(mixers[kind], mlp) for kind in config.layers_block_type]


def _granite(config: Any) -> list[LayerSpec]:
    turns = 1.0 if config.position_embedding_type == "rope" else None
    attention = _attention(config, turns, config.attention_multiplier)
    mlp = MoeSpec(
        config.num_local_experts,
        config.intermediate_size,
        RoutingRule(config.num_experts_per_tok, renormalise=True),
        shared=DenseSpec(config.shared_intermediate_size),
    )
    mixers = {"full_attention": attention, "linear_attention": _mamba(config)}
    residual = config.residual_multiplier
    return [LayerSpec(mixers[kind], mlp, residual, residual) for kind in config.layer_types]


def _falcon(config: Any) -> list[LayerSpec]:
    attention = _attention(config, 1.0)
    in_scale, out_scale = config.attention_in_multiplier, config.attention_out_multiplier
    gate, down = config.mlp_multipliers
    mixer = ParallelSpec(
        _attention(config, 1.0, in_scale**2 * config.key_multiplier * attention.head_dim**-0.5),
        _mamba(
            config,
            output_bias=config.projectors_bias,
            norm=config.mamba_rms_norm,
            scales=tuple(config.ssm_in_multiplier * scale for scale in config.ssm_multipliers),
        ),
        in_scale * out_scale,
        config.ssm_out_multiplier,
    )
    mlp = DenseSpec(config.intermediate_size, bias=config.mlp_bias, gate_scale=gate)
    return [LayerSpec(mixer, mlp, mlp_scale=down)] * config.num_hidden_layers


def _nemotron(config: Any) -> list[LayerSpec]:
    least, most = config.time_step_limit
    mamba = Mamba2Spec(
        config.mamba_num_heads,
        config.mamba_head_dim,
        config.n_groups,
        config.ssm_state_size,
        config.conv_kernel,
        config.use_conv_bias,
        config.use_bias,
        config.use_bias,
        least,
        most,
        norm_groups=config.n_groups,
    )
    rule = RoutingRule(
        config.num_experts_per_tok,
        scoring=Scoring.SIGMOID,
        renormalise=config.norm_topk_prob,
        scale=config.routed_scaling_factor,
        num_groups=config.n_group,
        top_groups=config.topk_group,
        group_best=2,
    )

    def dense(size: int) -> DenseSpec:
        return DenseSpec(size, Activation.RELU2, config.mlp_bias)

    experts = MoeSpec(
        config.n_routed_experts,
        config.moe_intermediate_size,
        rule,
        Activation.RELU2,
        selection_bias=True,
        wide_router=True,
        shared=dense(config.moe_shared_expert_intermediate_size),
        latent_size=config.moe_latent_size or 0,
    )
    layers = {
        "linear_attention": LayerSpec(mamba, None),
        "full_attention": LayerSpec(_attention(config, None), None),
        "mlp": LayerSpec(None, dense(config.intermediate_size)),
        "moe": LayerSpec(None, experts),
    }
    return [layers[kind] for kind in config.layers_block_type]


@pytest.mark.parametrize("name", PUBLISHED_MAMBA2)
def test_a_published_config_says_what_transformers_reads(name: str) -> None:
    fields = PUBLISHED_MAMBA2[name]
    assert facts_of_spec(parse_model_spec(fields)) == facts_of_transformers(fields)
    assert len(parse_model_spec(fields).layers) == fields["num_hidden_layers"]


@pytest.mark.parametrize("name", PUBLISHED_MAMBA2)
def test_what_a_file_leaves_out_has_transformers_value_or_is_named(name: str) -> None:
    published, num_compared = PUBLISHED_MAMBA2[name], 0
    for left_out in published.keys() - NAMES:
        fields = {field: value for field, value in published.items() if field != left_out}
        try:
            spec = parse_model_spec(fields)
        except ModelError as error:
            assert error.field == CONTRADICTIONS.get((name, left_out), left_out)
            continue
        assert facts_of_spec(spec) == facts_of_transformers(fields), left_out
        num_compared += 1
    assert num_compared >= 5


@pytest.mark.parametrize("wrong", ["?", ["?"], math.nan])
@pytest.mark.parametrize("name", PUBLISHED_MAMBA2)
def test_errors_name_the_field(name: str, wrong: Any) -> None:
    published, accepted = PUBLISHED_MAMBA2[name], set()
    for field in published.keys() - NAMES:
        try:
            parse_model_spec({**published, field: wrong})
        except ModelError as error:
            assert error.field == field
        else:
            accepted.add(field)
    assert accepted == published.keys() & (UNREAD_HERE | cast(set[str], UNREAD_BY.get(name, set())))


@pytest.mark.parametrize(
    ("name", "changes", "field"),
    [
        (BAMBA, {"attn_layer_indices": [32]}, "attn_layer_indices"),
        (BAMBA, {"attn_rotary_emb": 63}, "attn_rotary_emb"),
        (BAMBA, {"mamba_n_groups": 3}, "mamba_n_groups"),
        (BAMBA, {"time_step_limit": [1.0, 0.5]}, "time_step_limit"),
        (BAMBA, {"mamba_d_conv": 1}, "mamba_d_conv"),
        (GRANITE, {"position_embedding_type": "alibi"}, "position_embedding_type"),
        (FALCON, {"ssm_multipliers": [1.0] * 4}, "ssm_multipliers"),
        (FALCON, {"mamba_proj_bias": True}, "ssm_in_multiplier"),
        (NEMOTRON, {"hybrid_override_pattern": "MX"}, "hybrid_override_pattern"),
        (NEMOTRON, {"n_groups": 7}, "n_groups"),
        (NEMOTRON, {"mlp_hidden_act": "silu"}, "mlp_hidden_act"),
    ],
)
def test_what_is_not_served_is_named(name: str, changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ModelError) as caught:
        parse_model_spec({**PUBLISHED_MAMBA2[name], **changes})
    assert caught.value.field == field


def test_steps_without_a_limit_are_read_in_both_spellings() -> None:
    for infinity in (math.inf, 10**400, {"__float__": "Infinity"}):
        spec = parse_model_spec({**PUBLISHED_MAMBA2[BAMBA], "time_step_limit": [0.01, infinity]})
        mamba = spec.layers[0].mixer
        assert isinstance(mamba, Mamba2Spec) and (mamba.least_step, mamba.most_step) == (0.01, math.inf)
