"""What families with Mamba2 layers share: the fields of such a layer, and the names of its tensors."""

from __future__ import annotations

import math

from kernels.causal_conv import MAX_D_CONV
from worker_service.core.errors import ModelError
from worker_service.model.fields import MOST_NUMBER, Fields, flag, whole
from worker_service.model.layer_weights import LayerWeights, Mamba2Weights, MixerWeights, ParallelWeights
from worker_service.model.recurrent_specs import Mamba2Spec
from worker_service.model.spec import LayerSpec, MixerSpec, ModelSpec, ParallelSpec
from worker_service.model.take_weights import take_attention, take_linear, take_mixer, take_mlp
from worker_service.model.tensors import TensorSource

UNLIMITED = (0.0, math.inf)
# Whether a layer has attention, by the names in files of today and of before.
LAYER_TYPES = {"mamba": False, "linear_attention": False, "attention": True, "full_attention": True}


def read_mamba2(fields: Fields, inner_size: int | None = None) -> Mamba2Spec:
    """Returns the Mamba2 layer that `mamba_*` fields describe.

    `inner_size` counts the elements of all heads; None: `mamba_expand` times the hidden size.
    """
    inner_size = inner_size or int(whole(fields, "mamba_expand", 2) * whole(fields, "hidden_size"))
    num_heads, num_groups = whole(fields, "mamba_n_heads", 128), whole(fields, "mamba_n_groups", 1)
    head_dim = (
        inner_size // num_heads if fields.get("mamba_d_head") in (None, "auto") else whole(fields, "mamba_d_head")
    )
    if head_dim * num_heads != inner_size:
        raise ModelError("mamba_d_head", f"{num_heads} heads of {head_dim} elements do not make {inner_size}")
    if num_heads % num_groups:
        raise ModelError("mamba_n_groups", f"{num_groups} does not divide mamba_n_heads {num_heads}")
    least, most = read_step_limit(fields)
    bias = flag(fields, "mamba_proj_bias")
    return Mamba2Spec(
        num_heads=num_heads,
        head_dim=head_dim,
        num_groups=num_groups,
        d_state=whole(fields, "mamba_d_state", 256),
        width=whole(fields, "mamba_d_conv", 4, least=2, most=MAX_D_CONV),
        conv_bias=flag(fields, "mamba_conv_bias", True),
        inner_bias=bias,
        output_bias=bias,
        least_step=least,
        most_step=most,
    )


def read_step_limit(fields: Fields, name: str = "time_step_limit") -> tuple[float, float]:
    """Returns the bounds of a token's step size."""
    value = fields.get(name)
    if value is None:
        return UNLIMITED
    limits = [_limit(limit) for limit in value] if isinstance(value, list | tuple) else []
    if len(limits) != 2 or not 0.0 <= limits[0] <= limits[1]:
        raise ModelError(name, f"must be two numbers of 0 or more, in order, not {value!r}")
    return limits[0], limits[1]


def _limit(value: object) -> float:
    """Returns the number, nan for what is none. JSON has no infinity, which transformers writes as an object."""
    if value == {"__float__": "Infinity"}:
        return math.inf
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return math.inf if value > MOST_NUMBER else float(value)


def take_layer(source: TensorSource, prefix: str, spec: ModelSpec, layer: LayerSpec) -> LayerWeights:
    """Takes a layer by the names of Bamba and Falcon-H1."""
    hidden = spec.hidden_size
    return LayerWeights(
        mixer_norm=source.take(f"{prefix}.input_layernorm.weight", hidden),
        mixer=take_hybrid_mixer(source, prefix, layer.mixer, hidden),
        mlp_norm=source.take(f"{prefix}.pre_ff_layernorm.weight", hidden),
        mlp=take_mlp(source, f"{prefix}.feed_forward", layer.mlp, hidden),
    )


def take_hybrid_mixer(source: TensorSource, prefix: str, spec: MixerSpec | None, hidden: int) -> MixerWeights:
    """Takes a layer's Mamba2, its attention, or both."""
    if isinstance(spec, Mamba2Spec):
        return take_mamba2(source, f"{prefix}.mamba", spec, hidden)
    if isinstance(spec, ParallelSpec):
        attention = take_attention(source, f"{prefix}.self_attn", spec.attention, hidden)
        return ParallelWeights(attention, take_mamba2(source, f"{prefix}.mamba", spec.recurrence, hidden))
    return take_mixer(source, f"{prefix}.self_attn", spec, hidden)


def take_mamba2(source: TensorSource, prefix: str, spec: Mamba2Spec, hidden: int) -> Mamba2Weights:
    heads, inner, channels = spec.num_heads, spec.inner_size, spec.channels
    rows = inner + channels + heads
    return Mamba2Weights(
        inner=take_linear(source, [f"{prefix}.in_proj"], [rows], hidden, bias=spec.inner_bias),
        taps=source.take(f"{prefix}.conv1d.weight", channels, 1, spec.width).view(channels, spec.width),
        conv_bias=source.take(f"{prefix}.conv1d.bias", channels) if spec.conv_bias else None,
        a_log=source.take(f"{prefix}.A_log", heads, wide=True),
        skip=source.take(f"{prefix}.D", heads, wide=True),
        step_bias=source.take(f"{prefix}.dt_bias", heads, wide=True),
        output=take_linear(source, [f"{prefix}.out_proj"], [hidden], inner, bias=spec.output_bias),
        norm=source.take(f"{prefix}.norm.weight", inner) if spec.norm else None,
    )
