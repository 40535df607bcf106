"""How a layer's weights are taken from a checkpoint, by the names that most families use."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from worker_service.model.attention_specs import AttentionSpec, LatentSpec
from worker_service.model.layer_weights import (
    AttentionWeights,
    DenseWeights,
    ExpertWeight,
    LatentWeights,
    LayerWeights,
    Linear,
    MoeWeights,
)
from worker_service.model.spec import Activation, DenseSpec, LayerSpec, MixerSpec, ModelSpec, MoeSpec
from worker_service.model.tensors import TensorSource


class AttentionNames(NamedTuple):
    """What some families call otherwise. `{head}` stands for q and k."""

    output: str = "o_proj"
    head_norm: str = "{head}_norm"
    sinks: str = "sinks"


# Rows that a router gets for a gate beside its experts: more than one, as matrices are fastest in steps of 16 bytes.
GATE_ROWS = 8
# Of a projection of a shared expert that is computed with the others. Of DeepSeek V3 (14.7 million, fp8) that took 160
# us for one token, where apart it takes 140: nine experts are two waves of an H200's programs, eight are one.
MOST_FUSED_WEIGHTS = 4 << 20


USUAL_NAMES = AttentionNames()


def take_layer(source: TensorSource, prefix: str, spec: ModelSpec, layer: LayerSpec) -> LayerWeights:
    """Takes a PRE_NORM layer."""
    hidden, mlp = spec.hidden_size, layer.mlp
    return LayerWeights(
        mixer_norm=source.take(f"{prefix}.input_layernorm.weight", hidden),
        mixer=take_mixer(source, f"{prefix}.self_attn", layer.mixer, hidden),
        mlp_norm=source.take(f"{prefix}.post_attention_layernorm.weight", hidden),
        mlp=take_mlp(source, f"{prefix}.mlp", mlp, hidden),
    )


def take_mixer(
    source: TensorSource, prefix: str, spec: MixerSpec | None, hidden: int
) -> AttentionWeights | LatentWeights:
    """Takes an attention's weights."""
    if isinstance(spec, LatentSpec):
        return take_latents(source, prefix, spec, hidden)
    assert isinstance(spec, AttentionSpec)
    return take_attention(source, prefix, spec, hidden)


def take_mlp(
    source: TensorSource, prefix: str, spec: DenseSpec | MoeSpec | None, hidden: int
) -> DenseWeights | MoeWeights:
    if isinstance(spec, MoeSpec):
        return take_moe(source, prefix, spec, hidden)
    assert isinstance(spec, DenseSpec)
    return take_dense(source, prefix, spec, hidden)


def take_linear(source: TensorSource, names: list[str], rows: list[int], columns: int, *, bias: bool) -> Linear:
    """Returns the named projections as one, row under row."""
    weights = [source.take(f"{name}.weight", count, columns) for name, count in zip(names, rows, strict=True)]
    biases = [source.take(f"{name}.bias", count) for name, count in zip(names, rows, strict=True)] if bias else []
    return Linear(stacked(weights), stacked(biases) if biases else None)


def take_attention(
    source: TensorSource, prefix: str, spec: AttentionSpec, hidden: int, names: AttentionNames = USUAL_NAMES
) -> AttentionWeights:
    value_dim = spec.value_dim or spec.head_dim
    rows = [spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim, spec.num_kv_heads * value_dim]
    rows[0] *= 2 if spec.output_gate else 1
    q, k, v = (
        take_linear(source, [f"{prefix}.{name}_proj"], [count], hidden, bias=spec.qkv_bias)
        for name, count in zip("qkv", rows, strict=True)
    )
    output_name = f"{prefix}.{names.output}"
    output = take_linear(source, [output_name], [hidden], spec.num_heads * value_dim, bias=spec.output_bias)
    q_norm, k_norm = (
        source.take(f"{prefix}.{names.head_norm.format(head=head)}.weight", spec.head_dim) if spec.qk_norm else None
        for head in "qk"
    )
    sinks = source.take(f"{prefix}.{names.sinks}", spec.num_heads, wide=True) if spec.has_sinks else None
    q, gate = _without_gate(q, spec.head_dim) if spec.output_gate else (q, None)
    if spec.interleaved:
        q, k = (in_halves(linear, spec.head_dim, 0, spec.rotary_dim) for linear in (q, k))
    if spec.value_scale != 1.0:
        v = Linear(v.weight * spec.value_scale, None if v.bias is None else v.bias * spec.value_scale)
    if value_dim < spec.head_dim:
        v, output = _widened_values(v, output, value_dim, spec.head_dim)
    qkv = joined(q, k, v) if gate is None else joined(q, k, v, gate)
    return AttentionWeights(qkv, output, q_norm, k_norm, sinks)


def _without_gate(linear: Linear, head_dim: int) -> tuple[Linear, Linear]:
    """Returns the queries and the gates of a projection that has each head's gate behind its query."""
    hidden = linear.weight.shape[1]
    weights = linear.weight.view(-1, 2, head_dim, hidden)
    biases = None if linear.bias is None else linear.bias.view(-1, 2, head_dim)
    query, gate = (
        Linear(weights[:, part].flatten(0, 1), None if biases is None else biases[:, part].flatten()) for part in (0, 1)
    )
    return query, gate


def joined(*linears: Linear) -> Linear:
    """Returns projections of the same input as one, row under row; one without a bias has zeros beside one with."""
    weight = stacked([linear.weight for linear in linears])
    if all(linear.bias is None for linear in linears):
        return Linear(weight, None)
    biases = [
        linear.weight.new_zeros(linear.weight.shape[0]) if linear.bias is None else linear.bias for linear in linears
    ]
    return Linear(weight, stacked(biases))


def _widened_values(v: Linear, output: Linear, value_dim: int, head_dim: int) -> tuple[Linear, Linear]:
    """Returns projections for values as long as keys: the elements that are added are 0, and no output reads them."""
    missing = head_dim - value_dim
    hidden = v.weight.shape[1]
    rows = functional.pad(v.weight.view(-1, value_dim, hidden), (0, 0, 0, missing)).flatten(0, 1)
    bias = None if v.bias is None else functional.pad(v.bias.view(-1, value_dim), (0, missing)).flatten()
    columns = functional.pad(output.weight.view(hidden, -1, value_dim), (0, missing)).flatten(1)
    return Linear(rows, bias), Linear(columns, output.bias)


def in_halves(linear: Linear, head_dim: int, first: int, end: int) -> Linear:
    """Returns the projection with elements first .. end - 1 of each head in another order: even ones, then odd ones.

    What was turned as neighbours lies half of them apart then, as the kernels turn it, and scores do not see the order.
    """
    order = torch.arange(linear.weight.shape[0]).view(-1, head_dim)
    turned = order[:, first:end].clone()
    order[:, first:end] = torch.cat([turned[:, ::2], turned[:, 1::2]], dim=1)
    rows = order.flatten().to(linear.weight.device)
    return Linear(linear.weight[rows], None if linear.bias is None else linear.bias[rows])


def take_latents(source: TensorSource, prefix: str, spec: LatentSpec, hidden: int) -> LatentWeights:
    """By DeepSeek's names."""
    queries = spec.num_heads * spec.query_dim
    q = Linear(source.take(f"{prefix}.q_proj.weight", queries, hidden), None) if not spec.q_rank else None
    down = take_linear(source, [f"{prefix}.q_a_proj"], [spec.q_rank], hidden, bias=spec.bias) if q is None else q
    q_norm, q_up = None, None
    if q is None:
        q_norm = source.take(f"{prefix}.q_a_layernorm.weight", spec.q_rank)
        q_up = Linear(source.take(f"{prefix}.q_b_proj.weight", queries, spec.q_rank), None)
    kv = take_linear(source, [f"{prefix}.kv_a_proj_with_mqa"], [spec.width], hidden, bias=spec.bias)
    kv_norm = source.take(f"{prefix}.kv_a_layernorm.weight", spec.latent_dim)
    rows = spec.num_heads * (spec.nope_dim + spec.value_dim)
    kv_up = source.take(f"{prefix}.kv_b_proj.weight", rows, spec.latent_dim)
    output = take_linear(source, [f"{prefix}.o_proj"], [hidden], spec.num_heads * spec.value_dim, bias=spec.bias)
    if spec.interleaved:
        kv = in_halves(kv, spec.width, spec.latent_dim, spec.width)
        if q_up is None:
            down = in_halves(down, spec.query_dim, spec.nope_dim, spec.query_dim)
        else:
            q_up = in_halves(q_up, spec.query_dim, spec.nope_dim, spec.query_dim)
    return LatentWeights(joined(down, kv), kv_norm, kv_up, output, q_norm, q_up)


def take_experts(
    source: TensorSource,
    names: tuple[str, ...],
    count: int,
    rows: int,
    columns: int,
    shared: tuple[str, ...] = (),
) -> ExpertWeight:
    """Returns [count, len(names) * rows, columns]: of each expert the named matrices, row under row.

    `{expert}` in a name stands for the expert's number. Behind these comes the one of the names `shared`, if any.
    """
    named = [[name.format(expert=expert) for name in names] for expert in range(count)]
    return source.take_experts([*named, list(shared)] if shared else named, rows, columns)


def take_expert_matrices(
    source: TensorSource,
    spec: MoeSpec,
    gate_and_up: tuple[str, ...],
    down: str,
    shared: tuple[tuple[str, ...], str],
    hidden: int,
) -> tuple[ExpertWeight, ExpertWeight, bool]:
    """Returns gate_up and down of all experts, and whether the shared one is the last of them: where it is small, has
    the others' shape and is stored like them.

    `shared` has the shared expert's names, as `gate_and_up` and `down` have the others'.
    """
    count, inner, given = spec.num_experts, spec.intermediate_size, spec.latent_size or hidden
    first = [name.format(expert=0) for name in (*gate_and_up, down)]
    fuses = (
        spec.fits_shared
        and hidden * inner <= MOST_FUSED_WEIGHTS
        and source.stored_alike([*first[:-1], *shared[0]], inner, given)
        and source.stored_alike([first[-1], shared[1]], given, inner)
    )
    fused = shared if fuses else ((), "")
    return (
        take_experts(source, gate_and_up, count, inner, given, fused[0]),
        take_experts(source, (down,), count, given, inner, (fused[1],) if fuses else ()),
        fuses,
    )


def take_dense(source: TensorSource, prefix: str, spec: DenseSpec, hidden: int) -> DenseWeights:
    """Takes the gate where the activation has one, and the up and the down projection."""
    inner, names = spec.intermediate_size, [f"{prefix}.{name}" for name in gate_and_up(spec.activation)]
    gate_up = take_linear(source, names, [inner] * len(names), hidden, bias=spec.bias)
    return DenseWeights(gate_up, take_linear(source, [f"{prefix}.down_proj"], [hidden], inner, bias=spec.bias))


def take_moe(
    source: TensorSource, prefix: str, spec: MoeSpec, hidden: int, shared: str = "shared_experts"
) -> MoeWeights:
    """By the names of most families: a router `gate`, a gate, an up and a down projection for each expert, or each of
    these for all experts at once."""
    count = spec.num_experts
    router = source.take(f"{prefix}.gate.weight", count, hidden, wide=spec.wide_router)
    if spec.shared_gate:
        gate = source.take(f"{prefix}.{shared.removesuffix('s')}_gate.weight", 1, hidden, wide=spec.wide_router)
        router = stacked([router, gate, gate.new_zeros(GATE_ROWS - 1, hidden)])
    bias = source.take(f"{prefix}.gate.e_score_correction_bias", count, wide=True) if spec.selection_bias else None
    gate_up, down, fuses = _take_experts(source, prefix, shared, spec, hidden)
    return MoeWeights(
        Linear(router, None),
        gate_up,
        down,
        selection_bias=bias,
        shared=(
            None if fuses or spec.shared is None else take_dense(source, f"{prefix}.{shared}", spec.shared, hidden)
        ),
        fused_shared=fuses,
    )


def _take_experts(
    source: TensorSource, prefix: str, shared: str, spec: MoeSpec, hidden: int
) -> tuple[ExpertWeight, ExpertWeight, bool]:
    """Returns what `take_expert_matrices` does, by the names of most families."""
    parts, count, inner = gate_and_up(spec.activation), spec.num_experts, spec.intermediate_size
    joined, given = f"{prefix}.experts.gate_up_proj", spec.latent_size or hidden
    if source.holds(joined):
        gate_up = source.take(joined, count, len(parts) * inner, given)
        return gate_up, source.take(f"{prefix}.experts.down_proj", count, given, inner), False
    (names, down), (own, own_down) = (
        (tuple(f"{prefix}.{name}.{part}.weight" for part in parts), f"{prefix}.{name}.down_proj.weight")
        for name in ("experts.{expert}", shared)
    )
    return take_expert_matrices(source, spec, names, down, (own, own_down), hidden)


def gate_and_up(activation: Activation) -> tuple[str, ...]:
    """Returns the names of the projections that an MLP's middle is made of."""
    return ("gate_proj", "up_proj") if activation.is_gated else ("up_proj",)


def stacked(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Returns the tensors' rows one behind the other."""
    if len(tensors) == 1:
        return tensors[0]
    first = tensors[0]
    if first.is_meta:  # torch.cat would import PyTorch's compiler for these, which takes a start of a worker 1 to 2 s
        rows = sum(tensor.shape[0] for tensor in tensors)
        return torch.empty((rows, *first.shape[1:]), dtype=first.dtype, device=first.device)
    return torch.cat(tensors)
