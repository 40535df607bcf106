"""A decoder's forward pass, inference only: its layers are what the spec says, connected as its `Block` says.

What attention reads and where K and V go is the caller's `Attention`, recurrent layers' states are its `States`, the
matrix products are its `Gemm`.
"""

from __future__ import annotations

from collections.abc import Container

import torch

from kernels.backend import Backend
from kernels.linear import packed_weight
from kernels.softcap_logits import softcap_logits
from worker_service.model.families import family_of
from worker_service.model.layer_weights import LayerWeights, Linear
from worker_service.model.make_mixer import Mixer, make_mixer
from worker_service.model.mixers import Attention, Gemm, States, Step
from worker_service.model.mlps import Mlp, make_mlp
from worker_service.model.norms import Norm, make_norm
from worker_service.model.rope import RotaryTables
from worker_service.model.spec import Block, LayerSpec, ModelSpec
from worker_service.model.stream_layers import StreamLayer, StreamStack
from worker_service.model.take_compressed import take_streams_head
from worker_service.model.tensors import Expected, NamesOnly, TensorSource

ROOT = "model."
HEAD = "lm_head.weight"
STREAMS_HEAD = "hc_head"
# A layer's weights, and the parts that it has.
Branches = tuple[LayerWeights, Mixer | None, Mlp | None]


def expected_tensors(spec: ModelSpec, held: Container[str] = ()) -> dict[str, Expected]:
    """Returns all tensors that a checkpoint of this model holds, by name; where there are two spellings, the one whose
    names are among `held`."""
    names = NamesOnly(held)
    _take_ends(names, spec)
    for number in range(len(spec.layers)):
        _take_layer(names, spec, number)
    if spec.streams is not None:
        take_streams_head(names, f"{ROOT}{STREAMS_HEAD}", spec)
    return names.expected


def expected_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    return {name: tensor.shape for name, tensor in expected_tensors(spec).items()}


class Decoder:
    """Token ids and positions to hidden states, hidden states to logits.

    Its weights are taken from the source, layer by layer.
    """

    def __init__(
        self,
        spec: ModelSpec,
        source: TensorSource,
        device: torch.device,
        backend: Backend = Backend.AUTO,
    ) -> None:
        self.spec = spec
        self.device = device
        self.backend = backend
        self._embeddings, norm, head = _take_ends(source, spec)
        # Tied and packed, the matrix is there twice: rows of embeddings are read from the plain one.
        self._head = Linear(packed_weight(self._embeddings if head is None else head, backend), None)
        self._scale = torch.tensor(spec.embedding_scale, dtype=self.dtype).item()
        rotary = RotaryTables(spec.max_model_len, device)
        self._stack = _make_stack(spec, source, rotary, make_norm(spec.norm, norm, backend), self.dtype, backend)

    @property
    def dtype(self) -> torch.dtype:
        return self._embeddings.dtype

    def linears(self) -> list[Linear]:
        """Returns every projection, the head last."""
        return [*self._stack.linears(), self._head]

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention: Attention, states: States, gemm: Gemm
    ) -> torch.Tensor:
        """Returns the hidden states behind the final norm."""
        step = Step(token_ids, positions, attention, states, gemm)
        hidden = self._embeddings[token_ids]
        if self._scale != 1.0:
            hidden = hidden * self._scale
        return self._stack(hidden, step)

    def logits(self, normed: torch.Tensor, gemm: Gemm) -> torch.Tensor:
        """Returns [num_rows, vocab_size] in the model's dtype."""
        logits = gemm(normed, self._head)
        if self.spec.logits_scale != 1.0:
            logits = logits * self.spec.logits_scale
        cap = self.spec.logits_softcap
        return softcap_logits(logits, cap, backend=self.backend) if cap else logits


class ResidualStack:
    """All layers, from embeddings to what the head reads. Each sum with the residual is one launch with the norm
    after it."""

    def __init__(self, layers: list[DecoderLayer], norm: Norm) -> None:
        self._layers = layers
        self._norms = [*(layer.mixer_norm for layer in layers), norm]

    def linears(self) -> list[Linear]:
        return [linear for layer in self._layers for linear in layer.linears()]

    def __call__(self, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        x = self._norms[0](hidden)
        for layer, next_norm in zip(self._layers, self._norms[1:], strict=True):
            x, hidden = layer(x, hidden, next_norm, step)
        return x


class DecoderLayer:
    """One layer: its input is normed already, and it norms its output for the next one."""

    def __init__(self, branches: Branches, layer: LayerSpec, spec: ModelSpec, backend: Backend) -> None:
        def norm(weight: torch.Tensor | None) -> Norm | None:
            return None if weight is None else make_norm(spec.norm, weight, backend)

        weights, self._mixer, self._mlp = branches
        self.mixer_norm = make_norm(spec.norm, weights.mixer_norm, backend)
        self._scales = (layer.mixer_scale, layer.mlp_scale)
        self._mlp_norm = norm(weights.mlp_norm)
        self._norm_behind_mixer = norm(weights.norm_behind_mixer)
        self._norm_behind_mlp = norm(weights.norm_behind_mlp)
        self._block = spec.block

    def linears(self) -> list[Linear]:
        return [linear for branch in (self._mixer, self._mlp) if branch is not None for linear in branch.linears()]

    def __call__(
        self, x: torch.Tensor, hidden: torch.Tensor, next_norm: Norm, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the next layer's input, and the residual stream."""
        if self._block is Block.PARALLEL:
            return next_norm.with_residual(self._mixed(x, step) + self._made(x, step), hidden)
        if self._mlp is None:
            return next_norm.with_residual(self._mixed(x, step), hidden)
        if self._mixer is not None:
            assert self._mlp_norm is not None
            x, hidden = self._mlp_norm.with_residual(self._mixed(x, step), hidden)
        return next_norm.with_residual(self._made(x, step), hidden)

    def _mixed(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """Returns what the mixer adds to the residual stream."""
        assert self._mixer is not None
        return _branch(self._mixer(x, step), self._norm_behind_mixer, self._scales[0])

    def _made(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """Returns what the MLP adds to the residual stream."""
        assert self._mlp is not None
        return _branch(self._mlp(x, step), self._norm_behind_mlp, self._scales[1])


def _branch(out: torch.Tensor, norm: Norm | None, scale: float) -> torch.Tensor:
    out = out if norm is None else norm(out)
    return out if scale == 1.0 else out * scale


def _make_stack(
    spec: ModelSpec, source: TensorSource, rotary: RotaryTables, norm: Norm, dtype: torch.dtype, backend: Backend
) -> ResidualStack | StreamStack:
    def branches(number: int) -> Branches:
        return _branches(number, source, spec, rotary, dtype, backend)

    # No name for a layer's branches: a loop's would hold its experts, as they are stored, until the next ones are made.
    if spec.streams is None:
        layers = [DecoderLayer(branches(number), layer, spec, backend) for number, layer in enumerate(spec.layers)]
        return ResidualStack(layers, norm)
    streams = [StreamLayer(*branches(number), spec, backend) for number in range(len(spec.layers))]
    head = take_streams_head(source, f"{ROOT}{STREAMS_HEAD}", spec)
    return StreamStack(streams, spec.streams, head, spec.norm.eps, norm, backend)


def _branches(
    number: int, source: TensorSource, spec: ModelSpec, rotary: RotaryTables, dtype: torch.dtype, backend: Backend
) -> Branches:
    """Takes a layer's weights, and makes what it has of a mixer and an MLP."""
    layer, weights = spec.layers[number], _take_layer(source, spec, number)
    mixer, mlp = None, None
    if layer.mixer is not None:
        assert weights.mixer is not None
        mixer = make_mixer(number, layer.mixer, weights.mixer, spec.norm, weights.mixer_norm, rotary, backend)
    if layer.mlp is not None:
        assert weights.mlp is not None
        mlp = make_mlp(layer.mlp, weights.mlp, dtype, backend)
    return weights, mixer, mlp


def _take_ends(source: TensorSource, spec: ModelSpec) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Takes the embeddings, the final norm, and the head where it is a matrix of its own."""
    family = family_of(spec.architecture)
    embeddings = source.take(f"{ROOT}{family.embeddings}.weight", spec.vocab_size, spec.hidden_size)
    norm = source.take(f"{ROOT}{family.final_norm}.weight", spec.hidden_size)
    head = None if spec.tied_embeddings else source.take(HEAD, spec.vocab_size, spec.hidden_size)
    return embeddings, norm, head


def _take_layer(source: TensorSource, spec: ModelSpec, number: int) -> LayerWeights:
    family = family_of(spec.architecture)
    return family.take_layer(source, f"{ROOT}layers.{number}", spec, spec.layers[number])
