"""What is measured of the ops that move and touch up rows: fused append, norms, activation, latents, spill staging.

The figure is bytes read plus bytes written, each counted once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

from benchmarks.gpu_mla import PAGE, WIDTH
from benchmarks.measurement import LINK, ROUNDING, SHAPE, Maker, Measurement, Peer, difference, random, unequal
from kernels.append_kv import rotate_append_kv
from kernels.backend import Backend
from kernels.copy_pages import pack_pages, page_row_bytes, unpack_pages
from kernels.gated_activation import clamped_swiglu, gelu_mul, silu_mul
from kernels.gates import delta_gates, gated_rms_norm, times_sigmoid
from kernels.gather_latent import gather_latent
from kernels.rms_norm import rms_norm
from kernels.softcap_logits import softcap_logits
from tests.kernels.inputs import running_sums

FUSED_APPENDS = (16, 512 * 8, 4096 * 16)
ROWS = (16, 4096)
HIDDEN, INTERMEDIATE = 4096, 14336
DELTA_HEADS, EPS = (32, 128), 1e-6
LATENTS = ((64, 4096, 0), (16, 4096, 0), (8, 4096, 512))
SPILLED_PAGES, LAYERS = 64, 32
# bf16's step at 32: activations reach 56.
LARGE_ROUNDING = 2.0**-2
# Of gpt-oss and Gemma 2.
LIMIT, ALPHA, CAP, VOCAB = 7.0, 1.702, 30.0, 256_000


Rows = Callable[[], torch.Tensor]


def beside_torch(op: str, case: str, amount: float, run: Rows, peer: Rows, wanted: Rows | None = None) -> Measurement:
    """`wanted`: torch's result, where the peer's rounds more than once."""
    peers, by_torch = (Peer("torch", peer, amount),), wanted or peer
    return Measurement(op, case, amount, run, lambda: difference(run(), by_torch()), LARGE_ROUNDING, peers)


def fused_append(tokens: int) -> list[Measurement]:
    """The peer runs torch's ops one after the other."""
    heads, dim = SHAPE.q_heads + 2 * SHAPE.kv_heads, SHAPE.dim
    qkv, num_pages = random(tokens, heads, dim), -(-tokens // SHAPE.page_tokens) + 8
    angles = torch.rand(8192, dim // 2, device="cuda") * 6
    cos_sin = torch.stack((angles.cos(), angles.sin()), dim=1)
    positions = torch.arange(tokens, device="cuda") % 8192
    slots = torch.randperm(num_pages * SHAPE.page_tokens, device="cuda")[:tokens]
    size = (num_pages, SHAPE.page_tokens, SHAPE.kv_heads, dim)
    pages = [torch.zeros(size, dtype=SHAPE.dtype, device="cuda") for _ in range(2)]
    call = partial(rotate_append_kv, qkv, positions, cos_sin, *pages, slots, q_heads=SHAPE.q_heads)

    def error() -> float:
        right = [torch.zeros_like(page) for page in pages]
        args = (qkv, positions, cos_sin, *right, slots)
        wanted = rotate_append_kv(*args, q_heads=SHAPE.q_heads, backend=Backend.REFERENCE).packed
        got = call().packed
        return max(unequal(got, wanted), *(unequal(*pair) for pair in zip(pages, right, strict=True)))

    def peer() -> None:
        cos, sin = cos_sin[positions].unsqueeze(2).unbind(1)
        first, second = qkv[:, : SHAPE.q_heads + SHAPE.kv_heads].float().chunk(2, dim=-1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(SHAPE.dtype)
        for page, rows in zip(pages, (turned[:, SHAPE.q_heads :], qkv[:, -SHAPE.kv_heads :]), strict=True):
            page.view(-1, SHAPE.kv_heads, dim).index_copy_(0, slots, rows)

    amount = 2e-9 * qkv.numel() * qkv.element_size()
    peers = (Peer("torch", peer, amount),)
    return [Measurement("rotate_append_kv", f"{tokens} tokens", amount, call, error, peers=peers)]


def norm(rows: int) -> list[Measurement]:
    """With the residual's sum: two tensors in, two out."""
    x, residual, weight = random(rows, HIDDEN), random(rows, HIDDEN), random(HIDDEN)
    call = partial(rms_norm, x, weight, 1e-5, residual=residual)

    def peer() -> torch.Tensor:
        return functional.rms_norm(x + residual, weight.shape, weight, 1e-5)

    def error() -> float:
        return difference(call()[0], peer()) + unequal(call()[1], x + residual)

    amount, case = 8e-9 * x.numel(), f"{rows} x {HIDDEN} and residual"
    return [Measurement("rms_norm", case, amount, call, error, ROUNDING, (Peer("torch", peer, amount),))]


def swiglu_by_torch(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    gate = gate.clamp(max=LIMIT)
    return (up.clamp(-LIMIT, LIMIT) + 1) * (gate * torch.sigmoid(ALPHA * gate))


def activation(rows: int) -> list[Measurement]:
    """Two halves in, one row out; the clamped one rounds once, so torch's is compared in fp32."""
    gate_up = random(rows, 2 * INTERMEDIATE)
    gate, up = gate_up.chunk(2, dim=-1)

    size = (f"{rows} x {INTERMEDIATE}", 3e-9 * gate_up.numel())

    def gelu() -> torch.Tensor:
        return functional.gelu(gate, approximate="tanh") * up

    def wide_swiglu() -> torch.Tensor:
        return swiglu_by_torch(gate.float(), up.float()).to(gate.dtype)

    swiglu, by_torch = partial(clamped_swiglu, gate_up, limit=LIMIT, alpha=ALPHA), partial(swiglu_by_torch, gate, up)
    return [
        beside_torch("silu_mul", *size, partial(silu_mul, gate_up), lambda: functional.silu(gate) * up),
        beside_torch("gelu_mul", *size, partial(gelu_mul, gate_up), gelu),
        beside_torch("clamped_swiglu", *size, swiglu, by_torch, wide_swiglu),
    ]


def gates(rows: int) -> list[Measurement]:
    """Those of Qwen3-Next: attention's 16 heads of 256, and the delta rule's 32 of 128, slices of what a GEMM made."""
    heads, dim = DELTA_HEADS
    made = random(rows, 2 * heads * dim + 2 * heads)
    x, gate, decay, beta = made.split_with_sizes([heads * dim, heads * dim, heads, heads], dim=1)
    out, weight = random(rows, heads, dim), random(dim)
    bias, a = (torch.randn(heads, device="cuda") for _ in range(2))

    def norm_by_torch() -> torch.Tensor:
        normed = functional.rms_norm(out.float(), (dim,), weight.float(), EPS).flatten(1)
        return (normed * functional.silu(gate.float())).to(out.dtype)

    def decay_by_torch() -> torch.Tensor:
        return a * functional.softplus(decay.float() + bias)

    amount, case = 6e-9 * x.numel(), f"{rows} x {heads} x {dim}"
    gated_norm, of_decay = partial(gated_rms_norm, out, weight, EPS, gate), 12e-9 * decay.numel()
    return [
        beside_torch("times_sigmoid", case, amount, partial(times_sigmoid, x, gate), lambda: x * torch.sigmoid(gate)),
        beside_torch("gated_rms_norm", case, amount, gated_norm, norm_by_torch),
        beside_torch("delta_gates", case, of_decay, lambda: delta_gates(decay, beta, bias, a)[0], decay_by_torch),
    ]


def cap(rows: int) -> list[Measurement]:
    """Logits in and out."""
    logits = random(rows, VOCAB) * 20
    amount, call = 4e-9 * logits.numel(), partial(softcap_logits, logits, CAP)

    def peer() -> torch.Tensor:
        return torch.tanh(logits / CAP) * CAP

    def wanted() -> torch.Tensor:
        return (torch.tanh(logits.float() / CAP) * CAP).to(logits.dtype)

    return [beside_torch("softcap_logits", f"{rows} x {VOCAB}", amount, call, peer, wanted)]


def latents(sequences: int, cached: int, new: int) -> list[Measurement]:
    """The peers move the same rows by a list of indices that is made beforehand."""
    num_pages = sequences * cached // PAGE
    pages, fresh = random(num_pages, PAGE, WIDTH), random(sequences * new, WIDTH)
    tables = torch.randperm(num_pages, device="cuda").view(sequences, -1).int()
    sums = [running_sums([length] * sequences, "cuda") for length in (cached + new, new)]
    total = sequences * (cached + new)
    call = partial(gather_latent, pages, tables, sums[0], total, fresh, sums[1])
    slots = (tables.long().unsqueeze(-1) * PAGE + torch.arange(PAGE, device="cuda")).flatten()

    def error() -> float:
        return unequal(call(), call(backend=Backend.REFERENCE))

    cached_amount = 4e-9 * slots.numel() * WIDTH
    select = Peer(
        "index_select, cached rows alone", partial(torch.index_select, pages.view(-1, WIDTH), 0, slots), cached_amount
    )
    name = f"{sequences} x ({cached} + {new})"
    return [Measurement("gather_latent", name, 4e-9 * total * WIDTH, call, error, peers=(select,))]


def spill() -> list[Measurement]:
    """GB/s over the host link: all layers of a few pages to pinned memory and back; the peers stage on the device."""
    size = (LAYERS, 2, 4 * SPILLED_PAGES, SHAPE.page_tokens, SHAPE.kv_heads, SHAPE.dim)
    pages, ids = random(*size), torch.randperm(size[2], device="cuda")[:SPILLED_PAGES]
    host = torch.zeros(SPILLED_PAGES, page_row_bytes(pages, 2), dtype=torch.uint8, pin_memory=True)
    staged = torch.empty_like(host, device="cuda")

    def stage(out: bool) -> None:
        if out:
            pack_pages(pages, ids, staged, page_axis=2)
            host.copy_(staged, non_blocking=True)
        else:
            staged.copy_(host, non_blocking=True)
            unpack_pages(staged, pages, ids, page_axis=2)

    def error(unpacks: bool) -> float:
        host.zero_()
        pack_pages(pages, ids, host, page_axis=2)
        torch.cuda.synchronize()
        wanted = pages[:, :, ids].movedim(2, 0).reshape(SPILLED_PAGES, -1).view(torch.uint8)
        if unpacks:
            pages[:, :, ids] = 0
            unpack_pages(host, pages, ids, page_axis=2)
            return unequal(pages[:, :, ids].movedim(2, 0).reshape(SPILLED_PAGES, -1).view(torch.uint8), wanted)
        return unequal(host, wanted.cpu())

    amount, name = 1e-9 * host.numel(), f"{SPILLED_PAGES} pages of {host.shape[1]} B, pinned host memory"
    out = partial(pack_pages, pages, ids, host, page_axis=2)
    back = partial(unpack_pages, host, pages, ids, page_axis=2)
    staging = [Peer("staged on the device", partial(stage, out), amount) for out in (True, False)]
    return [
        Measurement("pack_pages", name, amount, out, partial(error, False), peers=(staging[0],), ceiling=LINK),
        Measurement("unpack_pages", name, amount, back, partial(error, True), peers=(staging[1],), ceiling=LINK),
    ]


AREAS: dict[str, tuple[Maker, ...]] = {
    "fused_appends": tuple(partial(fused_append, tokens) for tokens in FUSED_APPENDS),
    "rows": (*(partial(make, rows) for make in (norm, activation, gates) for rows in ROWS), partial(cap, 64)),
    "latents": tuple(partial(latents, *sizes) for sizes in LATENTS),
    "spills": (spill,),
}
