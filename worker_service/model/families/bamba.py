"""Bamba: Mamba2 in most layers, attention in a few, whose rotary embeddings cover half a head, an MLP in all."""

from __future__ import annotations

from worker_service.core.errors import ModelError
from worker_service.model.families.common import (
    model_spec,
    read_activation,
    read_heads,
    read_positions,
    usual_attention,
)
from worker_service.model.families.family import recurrent_family
from worker_service.model.families.mamba2 import read_mamba2, take_layer
from worker_service.model.fields import Fields, flag, layers_by_index, number, whole
from worker_service.model.rope_fields import rope_parameters, rotary_dim
from worker_service.model.spec import Activation, DenseSpec, LayerSpec, ModelSpec, NormSpec

BAMBA = "BambaForCausalLM"
DEFAULTS: Fields = {
    "vocab_size": 128_000,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 262_144,
    "eos_token_id": 2,
}
# Share of a head that is rotated, where no field says it.
ROTARY_SHARE = 0.5


def read_spec(fields: Fields) -> ModelSpec:
    heads, positions = read_heads(fields), read_positions(fields)
    attention = usual_attention(fields, positions.rope, rotary_dim=_rotary_dim(fields, heads.head_dim))
    mamba = read_mamba2(fields)
    activation = read_activation(fields, "hidden_act", (Activation.SILU,))
    mlp = DenseSpec(whole(fields, "intermediate_size"), activation, bias=flag(fields, "mlp_bias"))
    num_layers = whole(fields, "num_hidden_layers")
    attending = layers_by_index(fields, num_layers, "attn_layer_indices") or [False] * num_layers
    return model_spec(
        fields,
        layers=tuple(LayerSpec(attention if attends else mamba, mlp) for attends in attending),
        norm=NormSpec(number(fields, "rms_norm_eps", 1e-5)),
        max_model_len=positions.max_model_len,
    )


def _rotary_dim(fields: Fields, head_dim: int) -> int:
    """Returns how many elements are rotated: `attn_rotary_emb`, else a share of the head."""
    if fields.get("attn_rotary_emb") is not None:
        turned = whole(fields, "attn_rotary_emb")
        if turned % 2 or turned > head_dim:
            raise ModelError("attn_rotary_emb", f"{turned} is odd, or more than the {head_dim} elements of a head")
        return turned
    share = rope_parameters(fields).get("partial_rotary_factor", fields.get("partial_rotary_factor"))
    return rotary_dim({"partial_rotary_factor": ROTARY_SHARE if share is None else share}, head_dim)


FAMILY = recurrent_family(BAMBA, read_spec, take_layer, DEFAULTS, final_norm="final_layernorm")
