"""What the readers of all families share: the fields beside the layers, heads, positions and windows."""

from __future__ import annotations

from typing import Any, NamedTuple

from worker_service.core.errors import ModelError
from worker_service.model.attention_specs import AttentionSpec, RopeConfig
from worker_service.model.fields import Fields, first_of, flag, layer_types, one_of, whole
from worker_service.model.rope_fields import reach, read_rope, rope_parameters
from worker_service.model.spec import Activation, LayerSpec, ModelSpec, NormSpec

ACTIVATIONS = {
    "silu": Activation.SILU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
}
SLIDING = {"full_attention": False, "sliding_attention": True}
DENSE = {"dense": True, "sparse": False}


def model_spec(
    fields: Fields,
    *,
    layers: tuple[LayerSpec, ...],
    norm: NormSpec,
    max_model_len: int,
    tied: bool = False,
    **more: Any,
) -> ModelSpec:
    """Returns the spec of the layers, with the fields that all families call the same.

    `tied` is what tie_word_embeddings means where it is missing.
    """
    return ModelSpec(
        architecture=architecture_of(fields),
        dtype=str(fields.get("dtype") or fields.get("torch_dtype") or "float32"),
        vocab_size=whole(fields, "vocab_size"),
        hidden_size=whole(fields, "hidden_size"),
        max_model_len=max_model_len,
        layers=layers,
        norm=norm,
        tied_embeddings=flag(fields, "tie_word_embeddings", tied),
        **more,
    )


def architecture_of(fields: Fields) -> str:
    """Returns the name in `architectures`: several families share one `model_type`."""
    names = fields.get("architectures")
    if not isinstance(names, list) or not names:
        raise ModelError("architectures", f"must be a list with one name, not {names!r}")
    return str(names[0])


def read_num_mtp_layers(fields: Fields) -> int:
    """Returns how many layers for multi-token prediction the folder has behind the others; one where no field says
    it."""
    return whole(fields, first_of(fields, "num_nextn_predict_layers", "num_mtp_layers"), 1, least=0)


def read_activation(fields: Fields, name: str, known: tuple[Activation, ...]) -> Activation:
    """Returns the activation; the first known one is the default."""
    supported = {said: made for said, made in ACTIVATIONS.items() if made in known}
    activation: Activation = one_of(fields, name, supported, next(iter(supported)))
    return activation


class Heads(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_dim: int


def read_heads(fields: Fields, default_head_dim: int | None = None) -> Heads:
    """Returns the heads. A missing head_dim is `default_head_dim`, else the hidden size divided by the heads."""
    num_heads = whole(fields, "num_attention_heads")
    heads = Heads(num_heads, whole(fields, "num_key_value_heads", num_heads), _head_dim(fields, default_head_dim))
    if num_heads % heads.num_kv_heads:
        raise ModelError("num_key_value_heads", f"{heads.num_kv_heads} does not divide num_attention_heads {num_heads}")
    if heads.head_dim % 2:
        raise ModelError("head_dim", f"must be even for rotary embeddings, not {heads.head_dim}")
    return heads


def _head_dim(fields: Fields, default: int | None) -> int:
    if default is not None or fields.get("head_dim") is not None:
        return whole(fields, "head_dim", default)
    hidden_size, num_heads = whole(fields, "hidden_size"), whole(fields, "num_attention_heads")
    if hidden_size % num_heads:
        raise ModelError("num_attention_heads", f"{num_heads} does not divide hidden_size {hidden_size}")
    return hidden_size // num_heads


def usual_attention(fields: Fields, rope: RopeConfig | None, **more: Any) -> AttentionSpec:
    """Returns attention whose projections have a bias where `attention_bias` says so; all of a head is rotated.

    `more` are further fields of the spec, or others in place of these.
    """
    heads, bias = read_heads(fields), flag(fields, "attention_bias")
    usual = {"rotary_dim": heads.head_dim, "qkv_bias": bias, "output_bias": bias}
    return AttentionSpec(*heads, rope=rope, **{**usual, **more})


class Positions(NamedTuple):
    rope: RopeConfig
    max_model_len: int


def read_positions(fields: Fields) -> Positions:
    max_tokens = whole(fields, "max_position_embeddings")
    rope = read_rope(fields, max_tokens)
    return Positions(rope, reach(rope, max_tokens))


def require_whole_rope(fields: Fields) -> None:
    """Raises ModelError where only a part of each head is rotated, for families in which all of it is."""
    share = rope_parameters(fields).get("partial_rotary_factor", fields.get("partial_rotary_factor", 1.0))
    if share != 1.0:
        raise ModelError("partial_rotary_factor", f"{share!r} is not supported; 1.0 is")


def read_sliding(fields: Fields, num_layers: int) -> list[bool] | None:
    """Returns which layers have the window, by `layer_types`; None where the field is missing."""
    return layer_types(fields, num_layers, SLIDING)


def read_dense_layers(fields: Fields, num_layers: int) -> list[bool]:
    """Returns which layers have no experts, by `mlp_layer_types`; without it the first one."""
    default = [layer == 0 for layer in range(num_layers)]
    return layer_types(fields, num_layers, DENSE, "mlp_layer_types") or default
