"""Attention over latents in pages, for one launch: decode rows absorbed, prompts as the invariance asks (ADR 18)."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch

from kernels.backend import Backend
from kernels.latent_dims import LatentDims
from kernels.mla import (
    ExtendPlan,
    MlaPath,
    mla_absorbed,
    mla_extend,
    num_chunks,
    plan_extend,
    plan_on_device,
    workspace_bytes,
)
from kernels.mla_decode import MlaDecodePlan
from kernels.mla_prefill import AttentionState, MlaPrefillPlan
from kernels.rotate_append_latent import rotate_append_latent
from worker_service.gpu.page_pools import PagePools
from worker_service.model.attention_specs import LatentSpec
from worker_service.model.gemm_dispatch import GemmDispatch, Invariance
from worker_service.model.launch_inputs import LaunchInputs
from worker_service.model.mixers import Latents
from worker_service.model.spec import ModelSpec

# In `strict` a decoded token must have the bits that it has in a prompt, in `batch` a prompt's those of any other cut.
PATHS = {
    Invariance.STRICT: MlaPath.ABSORBED,
    Invariance.BATCH: MlaPath.MATERIALISED,
    Invariance.FAST: MlaPath.AUTO,
}
# The most memory for keys and values that a captured launch makes at a time: 16,384 latents of DeepSeek V3. Prompts of
# such models with more latents are not captured: the device takes longer than the host.
CAPTURED_BYTES = 1100 << 20
# The most chunks of a captured launch, where a whole chunk fits into that memory, as with fewer heads. A launch of 16
# tokens of Kimi Linear behind 65,536 takes an H200 24 ms; it took 59 when it was not captured.
CAPTURED_CHUNKS = 4


class LatentPlans:
    """Work lists on CUDA, made once; a launch prepares them for all its layers.

    Those of prompts serve captured launches: others have a plan from the host, which knows their lengths and cuts their
    latents into chunks. References need none.
    """

    def __init__(
        self,
        spec: ModelSpec,
        max_num_seqs: int,
        max_tokens: int,
        chunk_tokens: int,
        invariance: Invariance,
        device: torch.device,
        backend: Backend,
    ) -> None:
        self.mixers = {
            number: layer.mixer
            for number, layer in enumerate(spec.layers)
            if isinstance(layer.mixer, LatentSpec) and layer.mixer.index is None
        }
        self.backend = backend
        self._max_num_seqs = max_num_seqs
        self._chunk_tokens = chunk_tokens
        self._path = PATHS[invariance]
        self._num_heads = next((mixer.num_heads for mixer in self.mixers.values()), 0)
        self._decode: MlaDecodePlan | None = None
        self._prefill: tuple[MlaPrefillPlan, ...] = ()
        self._captured = captured_latents(chunk_tokens, spec.max_model_len, self.mixers.values())
        if self.mixers and device.type == "cuda" and backend is not Backend.REFERENCE:
            # Cuts by load are faster, and depend on who else decodes.
            by_load = invariance is Invariance.FAST
            self._decode = MlaDecodePlan(
                max_num_seqs, spec.max_model_len, self._num_heads, by_load=by_load, device=device
            )
            self._prefill = tuple(
                MlaPrefillPlan(max_num_seqs, max_tokens, device=device)
                for _ in range(num_chunks(self._captured.most, self._captured.chunk))
            )

    @property
    def captured_latents(self) -> int:
        """Returns how many latents prompts may have in a captured launch; 0: none can be captured, or there are none.

        A device-side plan materialises all prompts, which is what `batch` asks for.
        """
        return self._captured.most if self._path is MlaPath.MATERIALISED else 0

    def decode(self, launch: LaunchInputs) -> MlaDecodePlan | None:
        if self._decode is None or not 0 < launch.num_decode <= self._max_num_seqs:
            return None
        self._decode.prepare(launch.decode_seqlens_k)
        return self._decode

    def extend(self, launch: LaunchInputs, block_tables: torch.Tensor) -> ExtendPlan | None:
        if not launch.num_prefill:
            return None
        if launch.prompt_lens is None:
            return self._extend_on_device(launch, block_tables)
        return plan_extend(
            block_tables, *launch.prompt_lens, self._num_heads, path=self._path, chunk_tokens=self._chunk_tokens
        )

    def _extend_on_device(self, launch: LaunchInputs, block_tables: torch.Tensor) -> ExtendPlan:
        return plan_on_device(
            block_tables,
            launch.prefill_cu_q,
            launch.prefill_cu_k,
            self._num_heads,
            num_tokens=launch.token_ids.shape[0] - launch.num_decode,
            num_latents=launch.max_prompt_keys,
            chunk_tokens=self._captured.chunk,
            prefill_plans=self._prefill,
        )


class CapturedLatents(NamedTuple):
    """How many latents the prompts of a captured launch may have, all together.

    chunk   of how many keys and values are made at a time
    most    in all chunks
    """

    chunk: int
    most: int


def captured_latents(chunk_tokens: int, max_model_len: int, mixers: Collection[LatentSpec]) -> CapturedLatents:
    """Returns the bounds of captured launches over the latents of these mixers; 0 and 0 without mixers.

    chunk_tokens is that of launches that are not captured, and a chunk is never larger.
    """
    if not mixers:
        return CapturedLatents(0, 0)
    row_bytes = max(workspace_bytes(1, mixer.num_heads, _dims(mixer), torch.bfloat16) for mixer in mixers)
    # Powers of two, as the bounds of captured launches double.
    chunk = 1 << (CAPTURED_BYTES // row_bytes).bit_length() - 1
    if chunk < chunk_tokens:
        return CapturedLatents(chunk, chunk)
    longest = 1 << (max_model_len - 1).bit_length()
    return CapturedLatents(chunk_tokens, max(min(CAPTURED_CHUNKS * chunk_tokens, longest), chunk_tokens))


def latent_workspace_bytes(spec: ModelSpec, chunk_tokens: int, max_tokens: int, dtype: torch.dtype) -> int:
    """Returns the memory that prompts over latents need beside the pools; 0 for a model without, or with sparse ones.

    A chunk of a launch that is not captured, and what captured ones hold for themselves; for each the sums that
    max_tokens carry from chunk to chunk.
    """
    latents = (layer.mixer for layer in spec.layers if isinstance(layer.mixer, LatentSpec))
    mixers = {mixer for mixer in latents if mixer.index is None}
    captured = captured_latents(chunk_tokens, spec.max_model_len, mixers)
    launches = 1 + (captured.most > captured.chunk)
    return max(
        (
            workspace_bytes(chunk_tokens + captured.chunk, mixer.num_heads, _dims(mixer), dtype)
            + launches * AttentionState.num_bytes(max_tokens, mixer.num_heads, mixer.value_dim)
            for mixer in mixers
        ),
        default=0,
    )


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
