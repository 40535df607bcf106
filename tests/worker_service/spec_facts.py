"""What our reader makes of a config.json, as facts that can be compared with transformers' own."""

from __future__ import annotations

from typing import Any, NamedTuple

from worker_service.model.attention_specs import AttentionSpec, CompressedSpec, LatentSpec, RopeConfig
from worker_service.model.recurrent_specs import GatedDeltaSpec, KimiDeltaSpec, ShortConvSpec
from worker_service.model.spec import DenseSpec, LayerSpec, ModelSpec, MoeSpec


class Layer(NamedTuple):
    """What makes one layer.

    latents   ranks of queries and of latents, and the elements of a head without and with a rotation
    index     of an indexer the heads, their elements, how many tokens it chooses, and whether it is another layer's
    mlp       the experts' number, size, choice, scale, groups, the shared one's size, and whether tokens choose by id
    entries   the rank of queries, the groups of the output and their rank, and the tokens of a compressed entry or 0
    taps      of a short convolution, and whether it has biases; there are no heads then
    delta     of the gated delta rule the heads of values and of keys, the elements of a key and of a value, and taps
    kimi      of Kimi Delta Attention the heads, their elements, and taps
    """

    heads: tuple[int, int, int]
    value_dim: int
    value_scale: float
    window: int
    rope: dict[str, Any] | None
    rotary_dim: int
    scale: float
    softcap: float
    biases: tuple[bool, bool]
    qk_norm: bool
    mlp: tuple[Any, ...]
    latents: tuple[int, int, int, int] | None = None
    index: tuple[int, int, int, bool] | None = None
    taps: tuple[int, bool] | None = None
    delta: tuple[int, int, int, int, int] | None = None
    entries: tuple[int, int, int, int] | None = None
    kimi: tuple[int, int, int] | None = None


class Facts(NamedTuple):
    vocab_size: int
    hidden_size: int
    max_model_len: int
    eps: float
    tied: bool
    eos: tuple[int, ...]
    embedding_scale: float
    logits_scale: float
    logits_softcap: float
    layers: tuple[Layer, ...]
    # How many there are, how often their mix is balanced, and what keeps it from 0.
    streams: tuple[int, int, float] | None = None


def facts_of_spec(spec: ModelSpec) -> Facts:
    return Facts(
        spec.vocab_size,
        spec.hidden_size,
        spec.max_model_len,
        spec.norm.eps,
        spec.tied_embeddings,
        spec.eos_token_ids,
        spec.embedding_scale,
        spec.logits_scale,
        spec.logits_softcap,
        tuple(layer_of_spec(layer) for layer in spec.layers),
        spec.streams and (spec.streams.num_streams, spec.streams.num_iters, spec.streams.eps),
    )


def layer_of_spec(layer: LayerSpec) -> Layer:
    mixer = layer.mixer
    if isinstance(mixer, LatentSpec):
        return _latent_layer(mixer, _mlp_of_spec(layer.mlp))
    if isinstance(mixer, CompressedSpec):
        return _compressed_layer(mixer, _mlp_of_spec(layer.mlp))
    if isinstance(mixer, ShortConvSpec):
        return recurrent_layer(_mlp_of_spec(layer.mlp), taps=(mixer.width, mixer.bias))
    if isinstance(mixer, GatedDeltaSpec):
        heads = (mixer.num_heads, mixer.num_k_heads)
        return recurrent_layer(_mlp_of_spec(layer.mlp), delta=(*heads, mixer.key_dim, mixer.value_dim, mixer.width))
    if isinstance(mixer, KimiDeltaSpec):
        return recurrent_layer(_mlp_of_spec(layer.mlp), kimi=(mixer.num_heads, mixer.head_dim, mixer.width))
    assert isinstance(mixer, AttentionSpec)
    return Layer(
        (mixer.num_heads, mixer.num_kv_heads, mixer.head_dim),
        mixer.value_dim or mixer.head_dim,
        mixer.value_scale,
        mixer.window_tokens,
        None if mixer.rope is None else _rope_of_spec(mixer.rope),
        mixer.rotary_dim,
        mixer.head_dim**-0.5 if mixer.scale is None else mixer.scale,
        mixer.softcap,
        (mixer.qkv_bias, mixer.output_bias),
        mixer.qk_norm,
        _mlp_of_spec(layer.mlp),
    )


def recurrent_layer(mlp: tuple[Any, ...], **what: Any) -> Layer:
    return Layer((0, 0, 0), 0, 1.0, 0, None, 0, 0.0, 0.0, (False, False), False, mlp, **what)


def _latent_layer(mixer: LatentSpec, mlp: tuple[Any, ...]) -> Layer:
    head_dim, index = mixer.nope_dim + mixer.rope_dim, mixer.index
    return Layer(
        (mixer.num_heads, mixer.num_heads, head_dim),
        mixer.value_dim,
        1.0,
        0,
        None if mixer.rope is None else _rope_of_spec(mixer.rope),
        mixer.rope_dim,
        mixer.scale,
        0.0,
        (mixer.bias, mixer.bias),
        False,
        mlp,
        (mixer.q_rank, mixer.latent_dim, mixer.nope_dim, mixer.rope_dim),
        index=index and (index.num_heads, index.head_dim, index.top_k, index.is_shared),
    )


def _compressed_layer(mixer: CompressedSpec, mlp: tuple[Any, ...]) -> Layer:
    made, heads = mixer.compressor, (mixer.num_heads, 1, mixer.head_dim)
    index = made and made.index
    return Layer(
        heads,
        mixer.head_dim,
        1.0,
        mixer.window_tokens,
        _rope_of_spec(mixer.rope),
        mixer.rope_dim,
        mixer.head_dim**-0.5,
        0.0,
        (False, False),
        False,
        mlp,
        index=index and (index.num_heads, index.head_dim, index.top_k, index.is_shared),
        entries=(mixer.q_rank, mixer.output_groups, mixer.output_rank, made.ratio if made else 0),
    )


def _rope_of_spec(rope: RopeConfig) -> dict[str, Any]:
    facts: dict[str, Any] = {"rope_type": rope.kind.value, "rope_theta": rope.theta}
    if rope.kind.value != "default":
        facts["factor"] = rope.factor
    if rope.kind.value == "yarn":
        facts["original_max_position_embeddings"] = rope.original_max_tokens
        facts.update(beta_fast=rope.beta_fast, beta_slow=rope.beta_slow, truncate=rope.truncate)
    return facts


def _mlp_of_spec(mlp: DenseSpec | MoeSpec) -> tuple[Any, ...]:
    if isinstance(mlp, DenseSpec):
        return ("dense", mlp.intermediate_size)
    rule, shared = mlp.rule, mlp.shared.intermediate_size if mlp.shared else 0
    chosen = (rule.top_k, rule.renormalise, rule.scale, rule.num_groups, rule.top_groups)
    return ("experts", mlp.num_experts, mlp.intermediate_size, *chosen, shared, mlp.by_token)
