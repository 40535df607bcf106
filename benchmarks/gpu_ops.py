"""What is measured of the ops that move whole pages and write new tokens into them.

Each area gives makers of measurements, so that one case's tensors are freed before the next one's are made.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from benchmarks.gpu_peers import flashinfer_append
from benchmarks.measurement import SHAPE, TOKEN_BYTES, Maker, Measurement, Peer, unequal
from kernels.append_kv import append_kv
from kernels.backend import Backend
from kernels.copy_pages import pack_pages, page_row_bytes, unpack_pages
from kernels.gather_pages import gather_pages, scatter_pages
from kernels.layout import KvLayout
from tests.kernels.inputs import PagedCase, make_case

COPIES = ((16384, 32 << 10), (4096, 128 << 10), (65536, 1152))
APPENDS = (512 * 8, 4096 * 16)
GATHERS = ((16, KvLayout.NHD), (32, KvLayout.NHD), (32, KvLayout.HND))


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
        Measurement("pack_pages", name, amount, pack, pack_error, peers=(select,)),
        Measurement("unpack_pages", name, amount, unpack, unpack_error, peers=(put,)),
    ]


def append(tokens: int) -> list[Measurement]:
    """GB/s read plus written; a peer is one index_copy_ for K and one for V."""
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
    peers = (Peer("index_copy_", peer, amount), *flashinfer_append(case, amount))
    return [Measurement("append_kv", f"{tokens} tokens", amount, call, error, peers=peers)]


def gather(sequences: int, layout: KvLayout) -> list[Measurement]:
    """GB/s read plus written by sequences of 4096 tokens."""
    case: PagedCase = make_case([(4096, 0)] * sequences, replace(SHAPE, layout=layout))
    total, where = case.total_tokens, (case.block_tables, case.cu_seqlens_k)
    pages, dense = (case.k_pages, case.v_pages), (torch.cat(case.keys), torch.cat(case.values))

    def gather_error() -> float:
        return max(
            unequal(*pair) for pair in zip(gather_pages(*pages, *where, total, layout=layout), dense, strict=True)
        )

    def scatter_error() -> float:
        fresh = (torch.zeros_like(pages[0]), torch.zeros_like(pages[1]))
        scatter_pages(*dense, *fresh, *where, layout=layout)
        back = gather_pages(*fresh, *where, total, layout=layout, backend=Backend.REFERENCE)
        return max(unequal(*pair) for pair in zip(back, dense, strict=True))

    amount, name = 2e-9 * total * TOKEN_BYTES, f"{total} tokens, {layout.name}"
    gather_call, scatter_call = (
        partial(gather_pages, *pages, *where, total, layout=layout),
        partial(scatter_pages, *dense, *pages, *where, layout=layout),
    )
    return [
        Measurement("gather_pages", name, amount, gather_call, gather_error),
        Measurement("scatter_pages", name, amount, scatter_call, scatter_error),
    ]


AREAS: dict[str, tuple[Maker, ...]] = {
    "copies": tuple(partial(copy, *sizes) for sizes in COPIES),
    "appends": tuple(partial(append, tokens) for tokens in APPENDS),
    "gathers": tuple(partial(gather, *sizes) for sizes in GATHERS),
}
