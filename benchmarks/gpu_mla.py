"""What is measured of latent attention: prompts, the projection, appends, and the two paths of an extend.

The shapes are DeepSeek-V3's: 128 heads on one card, or the 16 that one of eight cards holds.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from benchmarks.gpu_peers import made_by_flashinfer, workspace
from benchmarks.measurement import (
    GEMM,
    OUT_TOLERANCE,
    ROUNDING,
    TOKENS,
    Maker,
    Measurement,
    Peer,
    against_reference,
    difference,
    random,
    row_error,
    unequal,
)
from kernels.backend import Backend
from kernels.gather_latent import gather_latent
from kernels.mla import MlaPath, mla_extend, plan_extend
from kernels.mla_prefill import MlaPrefillPlan, mla_prefill
from kernels.project_latents import project_latents
from kernels.rotate_append_latent import rotate_append_latent
from tests.kernels.inputs import running_sums

LATENT, ROPE, NOPE, VALUE = 512, 64, 128, 128
WIDTH = LATENT + ROPE
SCALE = (NOPE + ROPE) ** -0.5
PAGE = 64
BF16 = torch.bfloat16

PREFILLS = ((4, 4096, 512), (4, 0, 4096), (16, 0, 1024), (1, 8192, 4096))
APPENDS = ((128, 16), (128, 4096), (16, 65536))
PROJECTIONS = ((16384, 128),)
# Where the two paths meet; kernels/mla/rule.py holds what follows from it.
EXTENDS = tuple((heads, 4, 8192, new) for heads in (128, 16) for new in (32, 64, 96, 128, 192, 256))


def paged(sequences: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Latent pages and a table of them in random order."""
    count = -(-length // PAGE)
    pages = random(sequences * count, PAGE, WIDTH)
    return pages, torch.randperm(sequences * count, device="cuda").int().view(sequences, count)


def prefill(sequences: int, cached: int, new: int) -> list[Measurement]:
    """TFLOP/s of what a causal mask leaves of both products."""
    heads, total = 128, cached + new
    q, k_rope = random(sequences * new, heads, NOPE + ROPE), random(sequences * total, ROPE)
    kv = random(sequences * total, heads, NOPE + VALUE)
    bounds = (running_sums([new] * sequences, "cuda"), running_sums([total] * sequences, "cuda"))
    plan = MlaPrefillPlan(sequences, sequences * new)
    plan.prepare(*bounds)
    out = torch.full((sequences * new, heads, VALUE), float("nan"), dtype=BF16, device="cuda")

    def call(backend: Backend = Backend.AUTO) -> torch.Tensor:
        keys = (kv[..., :NOPE], k_rope, kv[..., NOPE:])
        if backend is Backend.REFERENCE:
            return mla_prefill(q, *keys, *bounds, new, backend=backend)
        return mla_prefill(q, *keys, *bounds, new, plan=plan, out=out)

    pairs = sequences * (new * cached + new * (new + 1) // 2)
    amount = 2e-12 * pairs * heads * (NOPE + ROPE + VALUE)
    peers = ragged_peer(q, kv, k_rope, bounds, amount)
    return against_reference("mla_prefill", f"{sequences} x ({cached} + {new})", amount, call, GEMM, peers)


@made_by_flashinfer
def ragged_peer(
    flashinfer: Any,
    q: torch.Tensor,
    kv: torch.Tensor,
    k_rope: torch.Tensor,
    bounds: tuple[torch.Tensor, torch.Tensor],
    amount: float,
) -> tuple[Peer, ...]:
    """FlashInfer's ragged prefill over keys of every head written out."""
    heads = q.shape[1]
    k = torch.cat([kv[..., :NOPE], k_rope.unsqueeze(1).expand(-1, heads, -1)], dim=-1)
    v = kv[..., NOPE:].contiguous()
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(), "NHD")
    sizes = (heads, heads, NOPE + ROPE)
    wrapper.plan(*bounds, *sizes, head_dim_vo=VALUE, causal=True, sm_scale=SCALE, q_data_type=BF16)
    return (Peer("flashinfer", partial(wrapper.run, q, k, v, out=torch.empty_like(v[: q.shape[0]])), amount),)


def append(heads: int, tokens: int) -> list[Measurement]:
    """GB/s read and written: each head's rotary part, and a row of kv and of the cache; the peer runs torch's ops."""
    q, kv = random(tokens, heads, NOPE + ROPE), random(tokens, WIDTH)
    norm, pages = random(LATENT), torch.zeros(-(-tokens // PAGE) + 8, PAGE, WIDTH, dtype=BF16, device="cuda")
    angles = torch.rand(8192, ROPE // 2, device="cuda") * 6
    cos_sin, positions = torch.stack((angles.cos(), angles.sin()), dim=1), torch.arange(tokens, device="cuda") % 8192
    slots = torch.randperm(pages.shape[0] * PAGE, device="cuda")[:tokens]
    call = partial(rotate_append_latent, norm=norm, eps=1e-6)

    def error() -> float:
        results = []
        for backend in (Backend.AUTO, Backend.REFERENCE):
            own, written = q.clone(), torch.zeros_like(pages)
            call(own, kv, positions, cos_sin, written, slots, backend=backend)
            results.append((own, written))
        (own, written), (own_wanted, wanted) = results
        exact = max(unequal(own, own_wanted), unequal(written[..., LATENT:], wanted[..., LATENT:]))
        return exact + difference(written[..., :LATENT], wanted[..., :LATENT])

    def peer() -> None:
        cos, sin = cos_sin[positions].unsqueeze(2).unbind(1)
        turning = torch.cat((q[..., NOPE:], kv[:, None, LATENT:]), dim=1)
        first, second = turning.float().chunk(2, dim=-1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(BF16)
        q[..., NOPE:] = turned[:, :-1]
        latents = torch.nn.functional.rms_norm(kv[:, :LATENT], norm.shape, norm, 1e-6)
        pages.view(-1, WIDTH).index_copy_(0, slots, torch.cat((latents, turned[:, -1]), dim=-1))

    amount = 4e-9 * tokens * (heads * ROPE + WIDTH)
    run = partial(call, q, kv, positions, cos_sin, pages, slots)
    case, peers = f"{heads} heads, {tokens} tokens", (Peer("torch", peer, amount),)
    return [Measurement("rotate_append_latent", case, amount, run, error, ROUNDING, peers)]


def project(count: int, heads: int) -> list[Measurement]:
    """TFLOP/s of gathering latents and projecting keys and values of every head."""
    pages, tables = paged(4, count // 4)
    bounds = running_sums([count // 4] * 4, "cuda")
    kv_b = random(heads * (NOPE + VALUE), LATENT) * LATENT**-0.5
    rows = (tables.long().unsqueeze(2) * PAGE + torch.arange(PAGE, device="cuda")).flatten()

    def call() -> torch.Tensor:
        return project_latents(gather_latent(pages, tables, bounds, count), kv_b, heads, NOPE).k_nope

    def peer() -> torch.Tensor:
        return pages.view(-1, WIDTH).index_select(0, rows)[:, :LATENT] @ kv_b.T

    def error() -> float:
        some = slice(0, count, 97)
        wanted = pages.view(-1, WIDTH)[rows[some], :LATENT].float() @ kv_b.float().T
        return row_error(call()[some], wanted.view(-1, heads, NOPE + VALUE)[..., :NOPE])

    amount = 2e-12 * count * heads * (NOPE + VALUE) * LATENT
    peers = (Peer("index_select_matmul", peer, amount),)
    case = f"{count} latents, {heads} heads"
    return [Measurement("project_latents", case, amount, call, error, OUT_TOLERANCE, peers, GEMM)]


def extend(heads: int, sequences: int, cached: int, new: int) -> list[Measurement]:
    """Thousands of new tokens per second through one layer's attention by the rule's path; the peers are both paths."""
    pages, tables = paged(sequences, cached + new)
    kv_b = random(heads * (NOPE + VALUE), LATENT) * LATENT**-0.5
    q = random(sequences * new, heads, NOPE + ROPE)
    lengths = ([new] * sequences, [cached] * sequences)

    def work(path: MlaPath) -> partial[torch.Tensor]:
        return partial(mla_extend, q, pages, kv_b, plan_extend(tables, *lengths, heads, path=path))

    fixed = {path: work(path) for path in (MlaPath.ABSORBED, MlaPath.MATERIALISED)}
    amount = 1e-3 * sequences * new

    def error() -> float:
        return row_error(*(run() for run in fixed.values()))

    peers = tuple(Peer(path.value, run, amount) for path, run in fixed.items())
    case = f"{heads} heads, {sequences} x ({cached} + {new})"
    return [Measurement("mla_extend", case, amount, work(MlaPath.AUTO), error, OUT_TOLERANCE, peers, TOKENS)]


AREAS: dict[str, tuple[Maker, ...]] = {
    "mla_prefill": tuple(partial(prefill, *sizes) for sizes in PREFILLS),
    "mla_append": tuple(partial(append, *sizes) for sizes in APPENDS),
    "mla_project": tuple(partial(project, *sizes) for sizes in PROJECTIONS),
    "mla_extend": tuple(partial(extend, *sizes) for sizes in EXTENDS),
}
