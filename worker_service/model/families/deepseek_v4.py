"""DeepSeek V4: a window of tokens and compressed entries, streams for a residual, experts chosen by token at first."""

from __future__ import annotations

from collections.abc import Mapping

from kernels.route_experts import RoutingRule, Scoring
from worker_service.core.errors import ModelError
from worker_service.model.attention_specs import CompressedSpec, CompressorSpec, IndexSpec, RopeConfig
from worker_service.model.families.common import model_spec, read_activation, read_num_mtp_layers
from worker_service.model.families.family import FULL_AND_WINDOW, Family
from worker_service.model.fields import Fields, layer_types, number, one_of, whole
from worker_service.model.mlps import SILU_LIMIT
from worker_service.model.rope_fields import reach, rope_of, rope_parameters, rotary_dim
from worker_service.model.spec import Activation, DenseSpec, LayerSpec, ModelSpec, MoeSpec, NormSpec, StreamsSpec
from worker_service.model.take_compressed import take_compressed_layer

V4 = "DeepseekV4ForCausalLM"
# Every block of tokens that an entry is made of ends within its page.
PAGE_TOKENS = 128
SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
LAYER_TYPES = {name: name for name in (SLIDING, SPARSE, HEAVY)}
RATES = {SPARSE: 4, HEAVY: 128}
BY_TOKEN = {"hash_moe": True, "moe": False}
DEFAULTS: Fields = {
    "q_lora_rank": 1024,
    "head_dim": 512,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "routed_scaling_factor": 1.5,
    "max_position_embeddings": 1_048_576,
    "eos_token_id": 1,
    "num_nextn_predict_layers": 1,
}
RENAMED = {
    "embed.weight": "model.embed_tokens.weight",
    "head.weight": "lm_head.weight",
    **{f"hc_head_{part}": f"model.hc_head.hc_{part}" for part in ("fn", "base", "scale")},
}


def read_spec(fields: Fields) -> ModelSpec:
    num_layers = whole(fields, "num_hidden_layers")
    kinds, by_token = _layer_kinds(fields, num_layers), _by_token(fields, num_layers)
    mixers, experts = _mixers(fields), _experts(fields)
    return model_spec(
        fields,
        layers=tuple(
            LayerSpec(mixers[kind], experts[of_token]) for kind, of_token in zip(kinds, by_token, strict=True)
        ),
        norm=NormSpec(number(fields, "rms_norm_eps", 1e-6)),
        max_model_len=reach(mixers[HEAVY].rope, whole(fields, "max_position_embeddings")),
        num_mtp_layers=read_num_mtp_layers(fields),
        streams=StreamsSpec(
            whole(fields, "hc_mult", 4), whole(fields, "hc_sinkhorn_iters", 20), number(fields, "hc_eps", 1e-6)
        ),
    )


def _layer_kinds(fields: Fields, num_layers: int) -> list[str]:
    """By name, by each layer's ratio, which published files have for layers behind the last one too, else two heavy
    ones first and then both kinds in turn."""
    named = layer_types(fields, num_layers, LAYER_TYPES)
    ratios = fields.get("compress_ratios")
    if named is not None or ratios is None:
        return named or [HEAVY if layer < 2 or layer % 2 == 0 else SPARSE for layer in range(num_layers)]
    by_ratio = {0: SLIDING, 4: SPARSE, 128: HEAVY}
    if (
        not isinstance(ratios, list)
        or len(ratios) < num_layers
        or any(type(ratio) is not int or ratio not in by_ratio for ratio in ratios)
    ):
        raise ModelError("compress_ratios", f"must be 0, 4 or 128 for each of the {num_layers} layers, not {ratios!r}")
    return [by_ratio[ratio] for ratio in ratios[:num_layers]]


def _by_token(fields: Fields, num_layers: int) -> list[bool]:
    named = layer_types(fields, num_layers, BY_TOKEN, "mlp_layer_types")
    num_hashed = whole(fields, "num_hash_layers", 3, least=0)
    return named or [layer < num_hashed for layer in range(num_layers)]


def _mixers(fields: Fields) -> dict[str, CompressedSpec]:
    ropes = _ropes(fields)
    rates = fields.get("compress_rates") or {}
    if not isinstance(rates, dict):
        raise ModelError("compress_rates", f"must be an object, not {rates!r}")
    for kind, rate in RATES.items():
        if rates.get(kind, rate) != rate:
            raise ModelError("compress_rates", f"{rates[kind]!r} is not supported for {kind}; {rate} is")
    whole(fields, "num_key_value_heads", 1, most=1)
    index = IndexSpec(
        whole(fields, "index_topk", 512), whole(fields, "index_n_heads", 64), whole(fields, "index_head_dim", 128)
    )
    compressors = {
        SLIDING: None,
        SPARSE: CompressorSpec(RATES[SPARSE], True, index),
        HEAVY: CompressorSpec(RATES[HEAVY], False),
    }
    return {kind: _mixer(fields, ropes[kind != SLIDING], made) for kind, made in compressors.items()}


def _mixer(fields: Fields, rope: RopeConfig, compressor: CompressorSpec | None) -> CompressedSpec:
    num_heads, groups = whole(fields, "num_attention_heads", 64), whole(fields, "o_groups", 8)
    if num_heads % groups:
        raise ModelError("o_groups", f"{groups} does not divide num_attention_heads {num_heads}")
    head_dim = whole(fields, "head_dim")
    rope_dim = _rope_dim(fields, head_dim)
    index = None if compressor is None else compressor.index
    if index is not None and index.head_dim < rope_dim:
        raise ModelError("index_head_dim", f"must be at least the {rope_dim} that turn, not {index.head_dim}")
    return CompressedSpec(
        num_heads=num_heads,
        head_dim=head_dim,
        rope_dim=rope_dim,
        q_rank=whole(fields, "q_lora_rank"),
        window_tokens=whole(fields, "sliding_window", 128),
        output_groups=groups,
        output_rank=whole(fields, "o_lora_rank", 1024),
        rope=rope,
        eps=number(fields, "rms_norm_eps", 1e-6),
        compressor=compressor,
    )


def _rope_dim(fields: Fields, head_dim: int) -> int:
    if fields.get("partial_rotary_factor") is not None:
        return rotary_dim({"partial_rotary_factor": fields["partial_rotary_factor"]}, head_dim)
    rope_dim = whole(fields, "qk_rope_head_dim", head_dim // 8)
    if rope_dim % 2 or rope_dim > head_dim:
        raise ModelError("qk_rope_head_dim", f"must be even and at most head_dim {head_dim}, not {rope_dim}")
    return rope_dim


def _ropes(fields: Fields) -> dict[bool, RopeConfig]:
    """Returns the ropes of layers with a window alone, and of those with entries, which alone are scaled."""
    said = rope_parameters(fields)
    main, compress = said.get("main"), said.get("compress")
    if not isinstance(main, dict) or not isinstance(compress, dict):
        rest = {name: value for name, value in said.items() if name != "rope_theta"}
        main, compress = {}, rest
    max_tokens = whole(fields, "max_position_embeddings")
    return {
        False: rope_of(main, number(fields, "rope_theta", 10_000.0), max_tokens),
        True: rope_of(_unscaled(compress), number(fields, "compress_rope_theta", 160_000.0), max_tokens),
    }


def _unscaled(rope: Mapping[str, object]) -> Fields:
    """A YaRN rope of V4 leaves the lengths of vectors as they are, unless the file says otherwise."""
    return {"attention_factor": 1.0, **rope}


def _experts(fields: Fields) -> dict[bool, MoeSpec]:
    """Returns the experts of layers that choose by score, and by token."""
    if number(fields, "swiglu_limit", SILU_LIMIT) != SILU_LIMIT:
        raise ModelError("swiglu_limit", f"{fields['swiglu_limit']!r} is not supported; {SILU_LIMIT} is")
    one_of(fields, "scoring_func", {"sqrtsoftplus": Scoring.SQRT_SOFTPLUS}, "sqrtsoftplus")
    read_activation(fields, "hidden_act", (Activation.SILU,))
    whole(fields, "n_shared_experts", 1, most=1)
    inner = whole(fields, "moe_intermediate_size", 2048)
    rule = RoutingRule(
        top_k=whole(fields, "num_experts_per_tok"),
        scoring=Scoring.SQRT_SOFTPLUS,
        renormalise=True,
        scale=number(fields, "routed_scaling_factor", 1.5),
    )
    return {
        by_token: MoeSpec(
            num_experts=whole(fields, "n_routed_experts"),
            intermediate_size=inner,
            rule=rule,
            activation=Activation.CLAMPED_SILU,
            selection_bias=not by_token,
            shared=DenseSpec(inner, Activation.CLAMPED_SILU),
            by_token=by_token,
        )
        for by_token in (False, True)
    }


FAMILY = Family(
    (V4,),
    read_spec,
    take_compressed_layer,
    DEFAULTS,
    roots=("model.", ""),
    ignored=("model.mtp.",),
    kinds=FULL_AND_WINDOW,
    page_tokens=PAGE_TOKENS,
    renamed=RENAMED,
)
