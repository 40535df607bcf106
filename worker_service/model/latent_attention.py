"""Attention over latents in pages, for one launch: decode rows absorbed, prompts as the invariance asks (ADR 18)."""

from __future__ import annotations

import torch

from kernels.backend import Backend
from kernels.latent_dims import LatentDims
from kernels.mla import ExtendPlan, MlaPath, mla_absorbed, mla_extend, plan_extend, workspace_bytes
from kernels.mla_decode import MlaDecodePlan
from kernels.rotate_append_latent import rotate_append_latent
from worker_service.gpu.page_pools import PagePools
from worker_service.model.gemm_dispatch import GemmDispatch, Invariance
from worker_service.model.launch_inputs import LaunchInputs
from worker_service.model.mixers import Latents
from worker_service.model.spec import LatentSpec, ModelSpec

# In `strict` a decoded token must have the bits that it has in a prompt, in `batch` a prompt's those of any other cut.
PATHS = {
    Invariance.STRICT: MlaPath.ABSORBED,
    Invariance.BATCH: MlaPath.MATERIALISED,
    Invariance.FAST: MlaPath.AUTO,
}


class LatentPlans:
    """Work lists of decode rows on CUDA, made once; a launch prepares them for all its layers. A prompt's are made for
    each launch. References need none."""

    def __init__(
        self,
        spec: ModelSpec,
        max_num_seqs: int,
        chunk_tokens: int,
        invariance: Invariance,
        device: torch.device,
        backend: Backend,
    ) -> None:
        self.mixers = {
            number: layer.mixer for number, layer in enumerate(spec.layers) if isinstance(layer.mixer, LatentSpec)
        }
        self.backend = backend
        self._max_num_seqs = max_num_seqs
        self._chunk_tokens = chunk_tokens
        self._path = PATHS[invariance]
        self._num_heads = next((mixer.num_heads for mixer in self.mixers.values()), 0)
        self._decode: MlaDecodePlan | None = None
        if self.mixers and device.type == "cuda" and backend is not Backend.REFERENCE:
            self._decode = MlaDecodePlan(max_num_seqs, spec.max_model_len, self._num_heads, device=device)

    def decode(self, launch: LaunchInputs) -> MlaDecodePlan | None:
        if self._decode is None or not 0 < launch.num_decode <= self._max_num_seqs:
            return None
        self._decode.prepare(launch.decode_seqlens_k)
        return self._decode

    def extend(self, launch: LaunchInputs, block_tables: torch.Tensor) -> ExtendPlan | None:
        if not launch.num_prefill:
            return None
        assert launch.prompt_lens is not None, "prompts over latents are not captured"
        return plan_extend(
            block_tables, *launch.prompt_lens, self._num_heads, path=self._path, chunk_tokens=self._chunk_tokens
        )


def latent_workspace_bytes(spec: ModelSpec, chunk_tokens: int, dtype: torch.dtype) -> int:
    """Returns the memory that a prompt over latents needs beside the pools; 0 for a model without latents."""
    mixers = {layer.mixer for layer in spec.layers if isinstance(layer.mixer, LatentSpec)}
    return max((workspace_bytes(chunk_tokens, mixer.num_heads, _dims(mixer), dtype) for mixer in mixers), default=0)


def _dims(mixer: LatentSpec) -> LatentDims:
    return LatentDims(mixer.latent_dim, mixer.rope_dim, mixer.nope_dim, mixer.value_dim)


class PagedLatents:
    """Attention over latents for one launch: new ones go to their pages first, so attention reads pages alone."""

    def __init__(self, pools: PagePools, launch: LaunchInputs, plans: LatentPlans, gemm: GemmDispatch) -> None:
        self._pools = pools
        self._launch = launch
        self._mixers = plans.mixers
        self._backend = plans.backend
        self._gemm = gemm
        self._group = pools.layer_pages(next(iter(plans.mixers))).group
        self._decode_plan = plans.decode(launch)
        self._extend_plan = plans.extend(launch, launch.block_tables[self._group][launch.num_decode :])

    def __call__(self, layer: int, latents: Latents) -> torch.Tensor:
        """Returns [num_tokens, heads, value_dim]. Padding rows are not written and never read."""
        launch, mixer = self._launch, self._mixers[layer]
        (pages,) = self._pools.layer_pages(layer).planes
        rotate_append_latent(
            latents.q,
            latents.kv,
            latents.positions,
            latents.cos_sin,
            pages,
            launch.slot_mapping[self._group],
            norm=latents.norm,
            eps=mixer.inner_eps,
            backend=self._backend,
        )
        q = latents.q
        out = q.new_empty((q.shape[0], mixer.num_heads, mixer.value_dim))
        if launch.num_decode:
            self._decode(q, pages, latents.kv_up, mixer, out)
        if self._extend_plan is not None:
            rows = slice(launch.num_decode, launch.num_decode + self._extend_plan.num_tokens)
            mla_extend(
                q[rows],
                pages,
                latents.kv_up,
                self._extend_plan,
                scale=mixer.scale,
                route=self._gemm.route(latents.kv_up),
                out=out[rows],
                backend=self._backend,
            )
        return out

    def _decode(
        self, q: torch.Tensor, pages: torch.Tensor, kv_up: torch.Tensor, mixer: LatentSpec, out: torch.Tensor
    ) -> None:
        launch = self._launch
        mla_absorbed(
            q[: launch.num_decode],
            pages,
            kv_up,
            launch.block_tables[self._group][: launch.num_decode],
            launch.decode_seqlens_k,
            max_seqlen_k=launch.max_seqlen_k,
            plan=self._decode_plan,
            scale=mixer.scale,
            out=out[: launch.num_decode],
            backend=self._backend,
        )
