"""What is measured of the attention ops: prompts behind prefixes, decode steps, and the merge of two states.

A plan is prepared beforehand, as a launch does once for all of its layers.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu_engine_peers import engine_peers
from benchmarks.gpu_peers import flashinfer_decode, flashinfer_merge, flashinfer_prefill, flex_causal
from benchmarks.measurement import COPY, GEMM, READ, SHAPE, TOKEN_BYTES, Maker, Measurement, Peer, against_reference
from kernels.backend import Backend
from kernels.decode_attention import DecodePlan, decode_attention
from kernels.fp8 import E4M3
from kernels.merge_attention_states import merge_attention_states
from kernels.prefill_attention import PrefillPlan, prefill_attention
from tests.kernels.inputs import PagedCase, make_case

PREFILLS = ((8, 4096, 512), (4, 0, 8192), (1, 32768, 2048))
# A conversation's next turn: keys and values are read, and little is computed.
NEXT_TURNS = ((1, 4096, 16), (1, 65536, 16))
# On and off the grid of the summation tree: a leaf is 512 keys, a group 2,048.
# More take 100 GB, with the dense keys that peers read.
MOST_KEYS = 4 << 20
OFF_THE_GRID = (2049, 4097, 4600, 5000, 6000, 8193, 33000)
DECODES = (
    *((1, 4096), (1, 32768), (16, 4096), (16, 32768), (64, 4096), (256, 4096)),
    *((batch, length) for batch in (1, 16, 64, 256) for length in OFF_THE_GRID if batch * length <= MOST_KEYS),
)
# Lengths drawn from 1 to 8,192.
MIXED_DECODES = (16, 64, 256)
# One sequence of this many keys, among others of 1,000.
LONG_AMONG_SHORT = ((15, 60000), (31, 60000))
DECODES_OF_CODES = ((1, 32768), (16, 4096), (64, 4096), (256, 4096))
HEADS = (SHAPE.q_heads, SHAPE.kv_heads, SHAPE.dim)
# Of windowed layers: query heads, kv heads, dim, window; and the batches.
WINDOWED_DECODES = (
    *((64, 8, 64, 128, batch, length) for batch, length in ((1, 65536), (64, 128), (64, 65536))),
    *((32, 8, 128, 4096, 1, length) for length in (4096, 8192, 65536)),
    *((16, 8, 256, 1024, 1, length) for length in (1024, 4096, 32768)),
)


def dense_peers(batch: int, queries: int, keys: int, causal: bool, amount: float) -> tuple[Peer, ...]:
    """torch's attention over contiguous keys of equal lengths: no pages."""
    sizes = ((SHAPE.q_heads, queries), (SHAPE.kv_heads, keys), (SHAPE.kv_heads, keys))
    q, k, v = (torch.randn(batch, *size, SHAPE.dim, dtype=SHAPE.dtype, device="cuda") for size in sizes)

    def work(backend: SDPBackend) -> None:
        with sdpa_kernel(backend):
            F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    backends = {"sdpa_flash": SDPBackend.FLASH_ATTENTION, "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION}
    peers = tuple(Peer(name, partial(work, backend), amount) for name, backend in backends.items())
    return (*peers, flex_causal(q, k, v, amount)) if causal else peers


def attention_tflop(sequences: int, cached: int, new: int) -> float:
    """What a causal mask leaves of both products."""
    pairs = new * cached + new * (new + 1) // 2
    return 4e-12 * sequences * pairs * SHAPE.q_heads * SHAPE.dim


def made_case(lengths: list[tuple[int, int]], codes: bool) -> tuple[PagedCase, dict[str, torch.Tensor]]:
    """Returns a batch, and with `codes` the scales of its fp8 pages; queries are bf16 always."""
    if not codes:
        return make_case(lengths, SHAPE), {}
    case = make_case(lengths, replace(SHAPE, dtype=E4M3))
    scales = {name: torch.ones(1, device="cuda") for name in ("k_scales", "v_scales")}
    return replace(case, q=case.q.to(SHAPE.dtype)), scales


def prefill(sequences: int, cached: int, new: int, codes: bool = False) -> list[Measurement]:
    """TFLOP/s, of next turns GB/s of keys and values read.

    The dense peers compute the whole causal square of the same keys, with the work that this is.
    """
    case, scales = made_case([(cached, new)] * sequences, codes)
    plan = PrefillPlan(sequences, sequences * new, *HEADS, device="cuda")
    plan.prepare(case.cu_seqlens_q, case.cu_seqlens_k)
    grouped = case.q.view(-1, SHAPE.kv_heads, HEADS[0] // HEADS[1], SHAPE.dim).transpose(0, 1).contiguous()
    out = torch.full_like(case.q, float("nan"))

    def call(backend: Backend = Backend.AUTO) -> torch.Tensor:
        where = (case.k_pages, case.v_pages, case.block_tables, case.cu_seqlens_q, case.cu_seqlens_k, new)
        if backend is Backend.REFERENCE:
            return prefill_attention(case.q, *where, backend=backend, **scales)
        return prefill_attention(grouped, *where, plan=plan, out=out, **scales)

    name, amount = f"{sequences} x ({cached} + {new})", attention_tflop(sequences, cached, new)
    total = cached + new
    if (sequences, cached, new) in NEXT_TURNS:
        amount = 1e-9 * sequences * total * TOKEN_BYTES
        peers = (*flashinfer_prefill(case, amount), *engine_peers(case, amount))
        return against_reference("prefill_attention", name, amount, call, READ, peers)
    if codes:
        return against_reference("prefill_attention", f"{name}, fp8", amount, call, GEMM)
    dense = dense_peers(sequences, total, total, causal=True, amount=attention_tflop(sequences, 0, total))
    peers = (*flashinfer_prefill(case, amount), *engine_peers(case, amount), *dense)
    return against_reference("prefill_attention", name, amount, call, GEMM, peers)


def decode(sequences: int, length: int) -> list[Measurement]:
    """GB/s of keys and values read, of sequences of one length."""
    amount = 1e-9 * sequences * length * TOKEN_BYTES
    dense = dense_peers(sequences, 1, length, causal=False, amount=amount)
    return decode_lengths(f"B{sequences} L{length}", [length] * sequences, dense)


def decode_mixed(sequences: int) -> list[Measurement]:
    """Lengths from 1 to 8,192, the same in every run."""
    rng = random.Random(sequences)
    return decode_lengths(f"B{sequences} L1-8192", [rng.randint(1, 8192) for _ in range(sequences)])


def decode_long_among_short(short: int, length: int) -> list[Measurement]:
    """One long sequence beside `short` ones of 1,000 keys."""
    return decode_lengths(f"B{short + 1} L1000, one {length}", [length, *[1000] * short])


def decode_codes(sequences: int, length: int) -> list[Measurement]:
    """GB/s of fp8 keys and values read: half the bytes for as many keys."""
    return decode_lengths(f"B{sequences} L{length}, fp8", [length] * sequences, codes=True)


def decode_lengths(
    name: str, lengths: list[int], dense: tuple[Peer, ...] = (), codes: bool = False
) -> list[Measurement]:
    case, scales = made_case([(length - 1, 1) for length in lengths], codes)
    seqlens, longest, amount = case.seqlens_k, max(lengths), 1e-9 * sum(lengths) * TOKEN_BYTES
    plan = DecodePlan(len(lengths), longest, *HEADS, device="cuda")
    plan.prepare(seqlens)

    def call(backend: Backend = Backend.AUTO) -> torch.Tensor:
        where = (case.q, case.k_pages, case.v_pages, case.block_tables, seqlens)
        planned = None if backend is Backend.REFERENCE else plan
        return decode_attention(*where, max_seqlen_k=longest, plan=planned, backend=backend, **scales)

    if codes:
        return against_reference("decode_attention", name, amount / SHAPE.dtype.itemsize, call, READ)
    peers = (*flashinfer_decode(case, amount), *engine_peers(case, amount), *dense)
    return against_reference("decode_attention", name, amount, call, READ, peers)


def decode_window(q_heads: int, kv_heads: int, dim: int, window: int, sequences: int, length: int) -> list[Measurement]:
    """GB/s of the keys and values that a window holds, with its own plan; the peer has the plan of all keys."""
    shape = replace(SHAPE, q_heads=q_heads, kv_heads=kv_heads, dim=dim, window=window)
    case = make_case([(length - 1, 1)] * sequences, shape)
    seqlens, where = case.seqlens_k, (case.k_pages, case.v_pages, case.block_tables)
    own, shared = (
        DecodePlan(sequences, length, q_heads, kv_heads, dim, window=planned, device="cuda") for planned in (window, 0)
    )
    for plan in (own, shared):
        plan.prepare(seqlens)

    def call(backend: Backend = Backend.AUTO, plan: DecodePlan = own) -> torch.Tensor:
        planned = None if backend is Backend.REFERENCE else plan
        options = {"max_seqlen_k": length, "window": window, "plan": planned, "backend": backend}
        return decode_attention(case.q, *where, seqlens, **options)

    amount = 2e-9 * sequences * min(window, length) * kv_heads * dim * SHAPE.dtype.itemsize
    name = f"{q_heads}/{kv_heads} heads, dim {dim}, window {window}, B{sequences} L{length}"
    peers = (Peer("plan of all keys", partial(call, plan=shared), amount),)
    return against_reference("decode_attention, window", name, amount, call, READ, peers)


def merge() -> list[Measurement]:
    """GB/s read plus written; a peer is the reference in torch."""
    tokens, heads, dim = 8192, 32, 128
    outs = [torch.randn(tokens, heads, dim, dtype=SHAPE.dtype, device="cuda") for _ in range(2)]
    lses = [torch.randn(heads, tokens, device="cuda") for _ in range(2)]

    def call(backend: Backend = Backend.AUTO) -> torch.Tensor:
        return merge_attention_states(outs[0], lses[0], outs[1], lses[1], backend=backend)[0]

    amount = 3e-9 * heads * tokens * (2 * dim + 4)
    peers = (Peer("torch", partial(call, Backend.REFERENCE), amount), *flashinfer_merge(outs, lses, amount))
    return against_reference("merge_attention_states", f"{tokens} x {heads} x {dim}", amount, call, COPY, peers)


AREAS: dict[str, tuple[Maker, ...]] = {
    "prefill": (
        *(partial(prefill, *sizes, codes) for codes in (False, True) for sizes in PREFILLS),
        *(partial(prefill, *sizes) for sizes in NEXT_TURNS),
    ),
    "decode": (
        *(partial(decode, *sizes) for sizes in DECODES),
        *(partial(decode_mixed, sequences) for sequences in MIXED_DECODES),
        *(partial(decode_long_among_short, *sizes) for sizes in LONG_AMONG_SHORT),
    ),
    "decode_codes": tuple(partial(decode_codes, *sizes) for sizes in DECODES_OF_CODES),
    "decode_window": tuple(partial(decode_window, *sizes) for sizes in WINDOWED_DECODES),
    "merge": (merge,),
}
