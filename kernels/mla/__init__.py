"""Latent attention of a layer: the absorbed path and the materialised one, and which of them a sequence takes.

Latents are appended before, q comes rotated, the output projection comes after.

    absorbed       q into the latents' space, mla_decode over the pages, the result out of that space
    materialised   chunk by chunk: gather latents, project keys and values, attend, carry the softmax on
"""

import torch

from kernels.backend import Backend
from kernels.errors import KernelArgumentError
from kernels.gather_latent import gather_latent
from kernels.head_linear import head_linear
from kernels.latent_dims import check_latent_dims
from kernels.linear import Route
from kernels.mla import cpu
from kernels.mla.absorb import absorbed_queries
from kernels.mla.device_plan import num_chunks, plan_on_device
from kernels.mla.plan import AbsorbedRun, ExtendPlan, MaterialisedRun, plan_extend, workspace_bytes
from kernels.mla.rule import MlaPath, choose_path
from kernels.mla.sparse import mla_sparse
from kernels.mla_decode import MlaDecodePlan, mla_decode
from kernels.mla_prefill import AttentionState, mla_prefill, mla_prefill_part
from kernels.project_latents import project_latents

__all__ = [
    "ExtendPlan",
    "MlaPath",
    "choose_path",
    "mla_absorbed",
    "mla_extend",
    "mla_sparse",
    "num_chunks",
    "plan_extend",
    "plan_on_device",
    "workspace_bytes",
]


def mla_extend(
    q: torch.Tensor,
    pages: torch.Tensor,
    kv_b: torch.Tensor,
    plan: ExtendPlan,
    *,
    scale: float | None = None,
    route: Route = Route.LIBRARY,
    out: torch.Tensor | None = None,
    backend: Backend = Backend.AUTO,
) -> torch.Tensor:
    """Causal attention of new tokens over cached and new latents, all read from pages.

    q [num_tokens, heads, nope + rope]; pages [num_pages, page_tokens, latent + rope]; kv_b [heads * (nope + value),
    latent]. The plan is made once per step and shared by all layers. Returns [num_tokens, heads, value]. On one path a
    token's bits depend neither on how its prompt was cut nor on other requests; the two paths round differently, so
    where bits must not depend on the number of new tokens the plan is made for one of them.
    """
    dims, heads = check_latent_dims(q, pages, kv_b), q.shape[1]
    if q.shape[0] != plan.num_tokens or heads != plan.heads:
        raise KernelArgumentError(
            f"q: the plan is for {plan.num_tokens} tokens of {plan.heads} heads, got {q.shape[0]} of {heads}"
        )
    factor = dims.head**-0.5 if scale is None else float(scale)
    if out is None:
        out = q.new_zeros((q.shape[0], heads, dims.value))
    for run in plan.runs:
        rows, target = q[run.first_token : run.last_token], out[run.first_token : run.last_token]
        if isinstance(run, AbsorbedRun):
            mla_absorbed(
                rows,
                pages,
                kv_b,
                run.block_tables,
                run.seqlens_k,
                cu_seqlens_q=run.cu_seqlens_q,
                max_q_tokens=run.max_q_tokens,
                max_seqlen_k=run.max_seqlen_k,
                plan=run.plan,
                scale=factor,
                out=target,
                backend=backend,
            )
        elif cpu.reason_against(q, backend) is None:
            cpu.materialise(rows, pages, kv_b, dims, run, factor, target)
        else:
            _materialise(rows, pages, kv_b, run, factor, route, target, backend)
    return out


def mla_absorbed(
    q: torch.Tensor,
    pages: torch.Tensor,
    kv_b: torch.Tensor,
    block_tables: torch.Tensor,
    seqlens_k: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor | None = None,
    max_q_tokens: int = 1,
    max_seqlen_k: int | None = None,
    plan: MlaDecodePlan | None = None,
    scale: float | None = None,
    out: torch.Tensor | None = None,
    backend: Backend = Backend.AUTO,
) -> torch.Tensor:
    """What decoding runs, always: q, pages, kv_b and out as in mla_extend, the rest as in mla_decode."""
    dims, heads = check_latent_dims(q, pages, kv_b), q.shape[1]
    factor = dims.head**-0.5 if scale is None else float(scale)
    matrices = kv_b.view(heads, dims.nope + dims.value, dims.latent)
    attended = mla_decode(
        absorbed_queries(q, matrices, dims, backend),
        pages,
        block_tables,
        seqlens_k,
        scale=factor,
        latent=dims.latent,
        cu_seqlens_q=cu_seqlens_q,
        max_q_tokens=max_q_tokens,
        max_seqlen_k=max_seqlen_k,
        plan=plan,
        backend=backend,
    )
    out = q.new_empty((q.shape[0], heads, dims.value)) if out is None else out
    return head_linear(attended, matrices[:, dims.nope :].transpose(1, 2), out, backend=backend)


def _materialise(
    q: torch.Tensor,
    pages: torch.Tensor,
    kv_b: torch.Tensor,
    run: MaterialisedRun,
    scale: float,
    route: Route,
    out: torch.Tensor,
    backend: Backend,
) -> None:
    """All but the last chunk leave their sums behind; a sequence may own nothing in a chunk."""
    state = AttentionState.empty(q.shape[0], q.shape[1], out.shape[2], q.device) if len(run.chunks) > 1 else None
    for index, chunk in enumerate(run.chunks):
        latents = gather_latent(
            pages,
            run.block_tables,
            chunk.cu_seqlens_k,
            chunk.num_latents,
            first_positions=chunk.first_positions,
            backend=backend,
        )
        nope = q.shape[2] - (pages.shape[2] - kv_b.shape[1])
        keys = project_latents(
            latents, kv_b, q.shape[1], nope, num_latents=chunk.cu_seqlens_k[-1:], route=route, backend=backend
        )
        arguments = (q, *keys, run.cu_seqlens_q, chunk.cu_seqlens_k, run.max_seqlen_q)
        offsets, plan = chunk.q_offsets, chunk.plan
        if state is not None and index < len(run.chunks) - 1:
            mla_prefill_part(
                *arguments, state, resumes=index > 0, q_offsets=offsets, scale=scale, plan=plan, backend=backend
            )
        else:
            mla_prefill(*arguments, q_offsets=offsets, scale=scale, state=state, plan=plan, out=out, backend=backend)
