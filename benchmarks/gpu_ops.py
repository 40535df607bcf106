"""What is measured of every kernel op: the inputs, the work, its check, and torch's own way to do the same.

Knows neither how time is taken nor where results go. Each area gives makers of measurements, so that one case's
tensors are freed before the next one's are made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.append_kv import append_kv
from kernels.backend import Backend
from kernels.copy_pages import pack_pages, page_row_bytes, unpack_pages
from kernels.decode_attention import decode_attention
from kernels.gather_pages import gather_pages, scatter_pages
from kernels.merge_attention_states import merge_attention_states
from kernels.prefill_attention import prefill_attention
from tests.kernels.inputs import CaseShape, PagedCase, make_case

SHAPE = CaseShape(page_tokens=16, q_heads=32, kv_heads=8, dim=128, dtype=torch.bfloat16, device="cuda")
TOKEN_BYTES = 2 * SHAPE.kv_heads * SHAPE.dim * SHAPE.dtype.itemsize
OUT_TOLERANCE = 3e-2

PREFILLS = ((8, 4096, 512), (4, 0, 8192), (1, 32768, 2048))
DECODES = ((1, 4096), (1, 32768), (16, 4096), (16, 32768), (64, 4096), (256, 4096))
COPIES = ((16384, 32 << 10), (4096, 128 << 10), (65536, 1152))
APPENDS = (512 * 8, 4096 * 16)

Work = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Peer:
    """Another way to do the work; `amount` where it is not the same amount."""

    name: str
    run: Work
    amount: float


@dataclass(frozen=True, slots=True)
class Measurement:
    """One op on one input. `error` runs the op and compares; `amount` over seconds gives `unit`."""

    op: str
    case: str
    unit: str
    amount: float
    run: Work
    error: Callable[[], float]
    tolerance: float = 0.0
    peers: tuple[Peer, ...] = ()


Maker = Callable[[], list[Measurement]]


def difference(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest absolute error; infinite where a value is not finite."""
    worst = (got.float() - wanted.float()).abs().max()
    return float(worst) if bool(torch.isfinite(worst)) else float("inf")


def unequal(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """0 when every byte agrees, else 1."""
    return 0.0 if torch.equal(got.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8)) else 1.0


def dense_peers(batch: int, queries: int, keys: int, causal: bool, amount: float) -> tuple[Peer, ...]:
    """torch's attention over contiguous keys of equal lengths: no pages."""
    sizes = ((SHAPE.q_heads, queries), (SHAPE.kv_heads, keys), (SHAPE.kv_heads, keys))
    q, k, v = (torch.randn(batch, *size, SHAPE.dim, dtype=SHAPE.dtype, device="cuda") for size in sizes)

    def work(backend: SDPBackend) -> None:
        with sdpa_kernel(backend):
            F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    backends = {"sdpa_flash": SDPBackend.FLASH_ATTENTION, "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION}
    return tuple(Peer(name, partial(work, backend), amount) for name, backend in backends.items())


def attention_tflop(sequences: int, cached: int, new: int) -> float:
    """What a causal mask leaves of both products."""
    pairs = new * cached + new * (new + 1) // 2
    return 4e-12 * sequences * pairs * SHAPE.q_heads * SHAPE.dim


def prefill(sequences: int, cached: int, new: int) -> list[Measurement]:
    """TFLOP/s. The peers compute the whole causal square of the same keys, with the work that this is."""
    case = make_case([(cached, new)] * sequences, SHAPE)

    def call(backend: Backend = Backend.AUTO) -> torch.Tensor:
        pages = (case.k_pages, case.v_pages, case.block_tables)
        return prefill_attention(case.q, *pages, case.cu_seqlens_q, case.cu_seqlens_k, new, backend=backend)

    total = cached + new
    return [
        Measurement(
            op="prefill_attention",
            case=f"{sequences} x ({cached} + {new})",
            unit="TFLOP/s",
            amount=attention_tflop(sequences, cached, new),
            run=call,
            error=lambda: difference(call(), call(Backend.REFERENCE)),
            tolerance=OUT_TOLERANCE,
            peers=dense_peers(sequences, total, total, causal=True, amount=attention_tflop(sequences, 0, total)),
        )
    ]


def decode(sequences: int, length: int) -> list[Measurement]:
    """GB/s of keys and values read."""
    case = make_case([(length - 1, 1)] * sequences, SHAPE)
    lengths, amount = case.seqlens_k, 1e-9 * sequences * length * TOKEN_BYTES

    def call(backend: Backend = Backend.AUTO) -> torch.Tensor:
        pages = (case.k_pages, case.v_pages, case.block_tables)
        return decode_attention(case.q, *pages, lengths, max_seqlen_k=length, backend=backend)

    return [
        Measurement(
            op="decode_attention",
            case=f"B{sequences} L{length}",
            unit="GB/s",
            amount=amount,
            run=call,
            error=lambda: difference(call(), call(Backend.REFERENCE)),
            tolerance=OUT_TOLERANCE,
            peers=dense_peers(sequences, 1, length, causal=False, amount=amount),
        )
    ]


def copy(count: int, width: int) -> list[Measurement]:
    """GB/s read plus written by packing and unpacking whole pages."""
    pages = torch.randint(0, 256, (2 * count, width), dtype=torch.uint8, device="cuda")
    ids = torch.randperm(2 * count, device="cuda")[:count]
    packed = torch.empty(count, page_row_bytes(pages), dtype=torch.uint8, device="cuda")
    words, packed_words = pages.view(torch.int64), packed.view(torch.int64)
    pack, unpack = partial(pack_pages, pages, ids, packed), partial(unpack_pages, packed, pages, ids)

    def pack_error() -> float:
        packed.zero_()
        pack()
        return unequal(packed, pages[ids])

    def unpack_error() -> float:
        packed.random_(0, 256)
        wanted = pages.index_copy(0, ids, packed)
        unpack()
        return unequal(pages, wanted)

    amount, name = 2e-9 * count * width, f"{count} pages of {width} B"
    select = Peer("index_select", partial(torch.index_select, words, 0, ids, out=packed_words), amount)
    put = Peer("index_copy_", partial(words.index_copy_, 0, ids, packed_words), amount)
    return [
        Measurement("pack_pages", name, "GB/s", amount, pack, pack_error, peers=(select,)),
        Measurement("unpack_pages", name, "GB/s", amount, unpack, unpack_error, peers=(put,)),
    ]


def append(tokens: int) -> list[Measurement]:
    """GB/s read plus written; the peer is one index_copy_ for K and one for V."""
    case = make_case([(0, tokens)], SHAPE)
    rows = (case.keys[0], case.values[0])
    slots = torch.randperm(case.k_pages.shape[0] * SHAPE.page_tokens, device="cuda")[:tokens]
    flat = [pages.view(-1, SHAPE.kv_heads, SHAPE.dim) for pages in (case.k_pages, case.v_pages)]
    call = partial(append_kv, *rows, case.k_pages, case.v_pages, slots)

    def error() -> float:
        wanted = [pages.index_copy(0, slots, new) for pages, new in zip(flat, rows, strict=True)]
        call()
        return max(unequal(pages, right) for pages, right in zip(flat, wanted, strict=True))

    def peer() -> None:
        for pages, new in zip(flat, rows, strict=True):
            pages.index_copy_(0, slots, new)

    amount = 2e-9 * tokens * TOKEN_BYTES
    peers = (Peer("index_copy_", peer, amount),)
    return [Measurement("append_kv", f"{tokens} tokens", "GB/s", amount, call, error, peers=peers)]


def gather() -> list[Measurement]:
    """GB/s read plus written by 16 sequences of 4096 tokens."""
    case: PagedCase = make_case([(4096, 0)] * 16, SHAPE)
    total, where = case.total_tokens, (case.block_tables, case.cu_seqlens_k)
    pages, dense = (case.k_pages, case.v_pages), (torch.cat(case.keys), torch.cat(case.values))

    def gather_error() -> float:
        return max(unequal(*pair) for pair in zip(gather_pages(*pages, *where, total), dense, strict=True))

    def scatter_error() -> float:
        fresh = (torch.zeros_like(pages[0]), torch.zeros_like(pages[1]))
        scatter_pages(*dense, *fresh, *where)
        back = gather_pages(*fresh, *where, total, backend=Backend.REFERENCE)
        return max(unequal(*pair) for pair in zip(back, dense, strict=True))

    amount, name = 2e-9 * total * TOKEN_BYTES, f"{total} tokens"
    gather_call, scatter_call = (
        partial(gather_pages, *pages, *where, total),
        partial(scatter_pages, *dense, *pages, *where),
    )
    return [
        Measurement("gather_pages", name, "GB/s", amount, gather_call, gather_error),
        Measurement("scatter_pages", name, "GB/s", amount, scatter_call, scatter_error),
    ]


def merge() -> list[Measurement]:
    """GB/s read plus written; the peer is the reference in torch."""
    tokens, heads, dim = 8192, 32, 128
    outs = [torch.randn(tokens, heads, dim, dtype=SHAPE.dtype, device="cuda") for _ in range(2)]
    lses = [torch.randn(heads, tokens, device="cuda") for _ in range(2)]
    call = partial(merge_attention_states, outs[0], lses[0], outs[1], lses[1])
    amount = 3e-9 * heads * tokens * (2 * dim + 4)
    return [
        Measurement(
            op="merge_attention_states",
            case=f"{tokens} x {heads} x {dim}",
            unit="GB/s",
            amount=amount,
            run=call,
            error=lambda: difference(call()[0], call(backend=Backend.REFERENCE)[0]),
            tolerance=OUT_TOLERANCE,
            peers=(Peer("torch", partial(call, backend=Backend.REFERENCE), amount),),
        )
    ]


AREAS: dict[str, tuple[Maker, ...]] = {
    "prefill": tuple(partial(prefill, *sizes) for sizes in PREFILLS),
    "decode": tuple(partial(decode, *sizes) for sizes in DECODES),
    "copies": tuple(partial(copy, *sizes) for sizes in COPIES),
    "appends": tuple(partial(append, tokens) for tokens in APPENDS),
    "gathers": (gather,),
    "merges": (merge,),
}
