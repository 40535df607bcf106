"""Layers over a residual of several streams: a branch gets one row of them, and its output goes back to each."""

from __future__ import annotations

import torch

from kernels.backend import Backend
from kernels.linear import packed_weight
from kernels.mix_streams import collapse_streams, expand_streams, join_streams
from kernels.rms_norm import rms_norm
from worker_service.model.layer_weights import LayerWeights, Linear, StreamWeights
from worker_service.model.make_mixer import Mixer
from worker_service.model.mixers import Step
from worker_service.model.mlps import Mlp
from worker_service.model.norms import Norm, make_norm
from worker_service.model.spec import ModelSpec, StreamsSpec


class StreamMixes:
    """What the normed row of all streams says of how they mix: fp32, as everything of it."""

    def __init__(self, weights: StreamWeights, norm_eps: float, backend: Backend) -> None:
        self.fn = Linear(packed_weight(weights.fn, backend), None)
        self.base, self.scale = weights.base, weights.scale
        self._ones = torch.ones(weights.fn.shape[1], dtype=torch.float32, device=weights.fn.device)
        self._eps = norm_eps
        self._backend = backend

    def __call__(self, streams: torch.Tensor, step: Step) -> torch.Tensor:
        rows = streams.flatten(1)
        normed = torch.empty(rows.shape, dtype=torch.float32, device=rows.device)
        return step.gemm(rms_norm(rows, self._ones, self._eps, out=normed, backend=self._backend), self.fn)


class StreamLayer:
    """A mixer and an MLP, each between a collapse of the streams and their mixing."""

    def __init__(
        self, weights: LayerWeights, mixer: Mixer | None, mlp: Mlp | None, spec: ModelSpec, backend: Backend
    ) -> None:
        assert spec.streams is not None and weights.streams is not None and weights.mlp_norm is not None
        assert mixer is not None and mlp is not None
        self._streams = spec.streams
        self._mixes = [StreamMixes(of_branch, spec.norm.eps, backend) for of_branch in weights.streams]
        self._norms = [make_norm(spec.norm, norm, backend) for norm in (weights.mixer_norm, weights.mlp_norm)]
        self._mixer, self._mlp = mixer, mlp
        self._backend = backend

    def linears(self) -> list[Linear]:
        return [*(mixes.fn for mixes in self._mixes), *self._mixer.linears(), *self._mlp.linears()]

    def __call__(self, streams: torch.Tensor, step: Step) -> torch.Tensor:
        for mixes, norm, branch in zip(self._mixes, self._norms, (self._mixer, self._mlp), strict=True):
            made = mixes(streams, step)
            x, post, comb = collapse_streams(
                streams,
                made,
                mixes.base,
                mixes.scale,
                eps=self._streams.eps,
                num_iters=self._streams.num_iters,
                backend=self._backend,
            )
            streams = expand_streams(branch(norm(x), step), streams, post, comb, backend=self._backend)
        return streams


class StreamStack:
    """All layers, from embeddings to what the head reads."""

    def __init__(
        self,
        layers: list[StreamLayer],
        streams: StreamsSpec,
        head: StreamWeights,
        norm_eps: float,
        norm: Norm,
        backend: Backend,
    ) -> None:
        self._layers = layers
        self._streams = streams
        self._head = StreamMixes(head, norm_eps, backend)
        self._norm = norm
        self._backend = backend

    def linears(self) -> list[Linear]:
        return [*(linear for layer in self._layers for linear in layer.linears()), self._head.fn]

    def __call__(self, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        streams = hidden.unsqueeze(1).expand(-1, self._streams.num_streams, -1).contiguous()
        for layer in self._layers:
            streams = layer(streams, step)
        head = self._head
        eps, mixes = self._streams.eps, head(streams, step)
        return self._norm(join_streams(streams, mixes, head.base, head.scale, eps=eps, backend=self._backend))
