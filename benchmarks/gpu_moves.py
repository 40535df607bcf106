"""What is measured of the ops that move and touch up rows: fused append, norms, activation, latents, spill staging.

The figure is bytes read plus bytes written, each counted once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

from benchmarks.measurement import LINK, SHAPE, Maker, Measurement, Peer, difference, unequal
from kernels.append_kv import rotate_append_kv
from kernels.append_latent import append_latent
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
LATENT, ROPE_KEY, LATENT_PAGE = 512, 64, 64
LATENTS = ((64, 4096, 0), (16, 4096, 0), (8, 4096, 512))
SPILLED_PAGES, LAYERS = 64, 32
# bf16's step at 8: a norm may sum in another order, and the largest values are that large.
ROUNDING = 2.0**-4
# Its step at 32: activations reach 56.
LARGE_ROUNDING = 2.0**-2
# Of gpt-oss and Gemma 2.
LIMIT, ALPHA, CAP, VOCAB = 7.0, 1.702, 30.0, 256_000


Rows = Callable[[], torch.Tensor]


def random(*size: int) -> torch.Tensor:
    return torch.randn(size, dtype=SHAPE.dtype, device="cuda")


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
    return [Measurement("rotate_append_kv", f"{tokens} tokens", "GB/s", amount, call, error, peers=peers)]


def norm(rows: int) -> list[Measurement]:
    """With the residual's sum: two tensors in, two out."""
    x, residual, weight = random(rows, HIDDEN), random(rows, HIDDEN), random(HIDDEN)
    call = partial(rms_norm, x, weight, 1e-5, residual=residual)

    def peer() -> torch.Tensor:
        return functional.rms_norm(x + residual, weight.shape, weight, 1e-5)

    amount = 8e-9 * x.numel()
    return [
        Measurement(
            op="rms_norm",
            case=f"{rows} x {HIDDEN} and residual",
            unit="GB/s",
            amount=amount,
            run=call,
            error=lambda: difference(call()[0], peer()) + unequal(call()[1], x + residual),
            tolerance=ROUNDING,
            peers=(Peer("torch", peer, amount),),
        )
    ]


def swiglu_by_torch(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    gate = gate.clamp(max=LIMIT)
    return (up.clamp(-LIMIT, LIMIT) + 1) * (gate * torch.sigmoid(ALPHA * gate))


def activation(rows: int) -> list[Measurement]:
    """Two halves in, one row out; the clamped one rounds once, so torch's is compared in fp32."""
    gate_up = random(rows, 2 * INTERMEDIATE)
    gate, up = gate_up.chunk(2, dim=-1)

    def measured(op: str, run: Rows, peer: Rows, wanted: Rows) -> Measurement:
        amount, case = 3e-9 * gate_up.numel(), f"{rows} x {INTERMEDIATE}"
        return Measurement(
            op, case, "GB/s", amount, run, lambda: difference(run(), wanted()), LARGE_ROUNDING,
            peers=(Peer("torch", peer, amount),),
        )  # fmt: skip

    by_torch = {
        "silu_mul": lambda: functional.silu(gate) * up,
        "gelu_mul": lambda: functional.gelu(gate, approximate="tanh") * up,
    }
    swiglu = partial(clamped_swiglu, gate_up, limit=LIMIT, alpha=ALPHA)
    return [
        measured("silu_mul", partial(silu_mul, gate_up), by_torch["silu_mul"], by_torch["silu_mul"]),
        measured("gelu_mul", partial(gelu_mul, gate_up), by_torch["gelu_mul"], by_torch["gelu_mul"]),
        measured(
            "clamped_swiglu", swiglu, partial(swiglu_by_torch, gate, up),
            lambda: swiglu_by_torch(gate.float(), up.float()).to(gate.dtype),
        ),
    ]  # fmt: skip


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

    def measured(op: str, run: Rows, peer: Rows, amount: float) -> Measurement:
        return Measurement(
            op, f"{rows} x {heads} x {dim}", "GB/s", amount, run, lambda: difference(run(), peer()), LARGE_ROUNDING,
            peers=(Peer("torch", peer, amount),),
        )  # fmt: skip

    amount = 6e-9 * x.numel()
    return [
        measured("times_sigmoid", partial(times_sigmoid, x, gate), lambda: x * torch.sigmoid(gate), amount),
        measured("gated_rms_norm", partial(gated_rms_norm, out, weight, EPS, gate), norm_by_torch, amount),
        measured(
            "delta_gates",
            lambda: delta_gates(decay, beta, bias, a)[0],
            lambda: a * functional.softplus(decay.float() + bias),
            12e-9 * decay.numel(),
        ),
    ]


def cap(rows: int) -> list[Measurement]:
    """Logits in and out."""
    logits = random(rows, VOCAB) * 20
    amount, call = 4e-9 * logits.numel(), partial(softcap_logits, logits, CAP)

    def peer() -> torch.Tensor:
        return torch.tanh(logits / CAP) * CAP

    def error() -> float:
        return difference(softcap_logits(logits, CAP), (torch.tanh(logits.float() / CAP) * CAP).to(logits.dtype))

    peers = (Peer("torch", peer, amount),)
    name = f"{rows} x {VOCAB}"
    return [Measurement("softcap_logits", name, "GB/s", amount, call, error, tolerance=LARGE_ROUNDING, peers=peers)]


def latents(sequences: int, cached: int, new: int) -> list[Measurement]:
    """The peers move the same rows by a list of indices that is made beforehand."""
    width, num_pages = LATENT + ROPE_KEY, sequences * cached // LATENT_PAGE
    pages, fresh = random(num_pages, LATENT_PAGE, width), random(sequences * new, width)
    tables = torch.randperm(num_pages, device="cuda").view(sequences, -1).int()
    sums = [running_sums([length] * sequences, "cuda") for length in (cached + new, new)]
    total = sequences * (cached + new)
    call = partial(gather_latent, pages, tables, sums[0], total, fresh, sums[1])
    slots = (tables.long().unsqueeze(-1) * LATENT_PAGE + torch.arange(LATENT_PAGE, device="cuda")).flatten()
    rows, flat = random(slots.numel(), width), pages.view(-1, width)
    put = partial(append_latent, rows[:, :LATENT], rows[:, LATENT:], pages, slots)

    def put_error() -> float:
        wanted = flat.index_copy(0, slots, rows)
        put()
        return unequal(flat, wanted)

    amount, put_amount = 4e-9 * total * width, 4e-9 * rows.numel()
    select = Peer("index_select, cached rows alone", partial(torch.index_select, flat, 0, slots), put_amount)
    copied = Peer("index_copy_", partial(flat.index_copy_, 0, slots, rows), put_amount)
    name = f"{sequences} x ({cached} + {new})"
    return [
        Measurement(
            op="gather_latent",
            case=name,
            unit="GB/s",
            amount=amount,
            run=call,
            error=lambda: unequal(call(), call(backend=Backend.REFERENCE)),
            peers=(select,),
        ),
        Measurement("append_latent", f"{slots.numel()} rows", "GB/s", put_amount, put, put_error, peers=(copied,)),
    ]


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
        Measurement("pack_pages", name, "GB/s", amount, out, partial(error, False), peers=(staging[0],), ceiling=LINK),
        Measurement(
            "unpack_pages", name, "GB/s", amount, back, partial(error, True), peers=(staging[1],), ceiling=LINK
        ),
    ]


AREAS: dict[str, tuple[Maker, ...]] = {
    "fused_appends": tuple(partial(fused_append, tokens) for tokens in FUSED_APPENDS),
    "rows": (*(partial(make, rows) for make in (norm, activation, gates) for rows in ROWS), partial(cap, 64)),
    "latents": tuple(partial(latents, *sizes) for sizes in LATENTS),
    "spills": (spill,),
}
