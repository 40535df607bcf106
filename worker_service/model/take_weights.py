"""How a layer's weights are taken from a checkpoint, by the names that most families use."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from kernels.grouped_linear import MAX_EXPERTS
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


class ExpertNames(NamedTuple):
    """The names of an expert's matrices; `{expert}` in one stands for the expert's number."""

    gate_and_up: tuple[str, ...]
    down: str


class ExpertMatrices(NamedTuple):
    """gate_up and down of all experts; `fused_shared`: with the shared one behind those that are chosen from."""

    gate_up: ExpertWeight
    down: ExpertWeight
    fused_shared: bool = False


# Rows that a router gets for a gate beside its experts: more than one, as matrices are fastest in steps of 16 bytes.
GATE_ROWS = 8
# The most weights of each matrix of a shared expert that is computed with the others. With DeepSeek V3's (14.7 million,
# fp8) one token took 160 us, where apart it takes 140: nine experts are two waves of an H200's programs, eight are one.
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

    `{expert}` in a name stands for the expert's number. With `shared`, names of the same matrices of the shared expert,
    that one is the last, [count + 1, ...].
    """
    named = [[name.format(expert=expert) for name in names] for expert in range(count)]
    return source.take_experts([*named, list(shared)] if shared else named, rows, columns)


def take_expert_matrices(
    source: TensorSource,
    spec: MoeSpec,
    names: ExpertNames,
    shared: ExpertNames,
    hidden: int,
) -> ExpertMatrices:
    """Takes the shared expert with the others where it is small, has their shape and is stored like them."""
    count, inner, given = spec.num_experts, spec.intermediate_size, spec.latent_size or hidden
    gate_and_up = [name.format(expert=0) for name in names.gate_and_up]
    fuses = (
        spec.fits_shared
        and count < MAX_EXPERTS
        and hidden * inner <= MOST_FUSED_WEIGHTS
        and source.stored_alike([*gate_and_up, *shared.gate_and_up], inner, given)
        and source.stored_alike([names.down.format(expert=0), shared.down], given, inner)
    )
    fused_gate_and_up, fused_down = (shared.gate_and_up, (shared.down,)) if fuses else ((), ())
    return ExpertMatrices(
        take_experts(source, names.gate_and_up, count, inner, given, fused_gate_and_up),
        take_experts(source, (names.down,), count, given, inner, fused_down),
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
    gate_up, down, fused_shared = _take_experts(source, prefix, shared, spec, hidden)
    apart = None
    if spec.shared is not None and not fused_shared:
        apart = take_dense(source, f"{prefix}.{shared}", spec.shared, hidden)
    return MoeWeights(Linear(router, None), gate_up, down, selection_bias=bias, shared=apart, fused_shared=fused_shared)


def _take_experts(source: TensorSource, prefix: str, shared: str, spec: MoeSpec, hidden: int) -> ExpertMatrices:
    """Returns what `take_expert_matrices` does, by the names of most families."""
    parts, count, inner = gate_and_up(spec.activation), spec.num_experts, spec.intermediate_size
    joined, given = f"{prefix}.experts.gate_up_proj", spec.latent_size or hidden
    if source.holds(joined):
        gate_up = source.take(joined, count, len(parts) * inner, given)
        return ExpertMatrices(gate_up, source.take(f"{prefix}.experts.down_proj", count, given, inner))

    def names_of(expert: str) -> ExpertNames:
        gate_and_up = tuple(f"{prefix}.{expert}.{part}.weight" for part in parts)
        return ExpertNames(gate_and_up, f"{prefix}.{expert}.down_proj.weight")

    return take_expert_matrices(source, spec, names_of("experts.{expert}"), names_of(shared), hidden)


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
