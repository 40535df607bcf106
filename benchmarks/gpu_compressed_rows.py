"""What is measured of the ops around DeepSeek V4's attention: raw rows and entries, tails that turn, streams.

A launch of decoding rows, in each of which a block ends, and one of a prompt. The figure is bytes read plus bytes
written, each counted once.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from benchmarks.gpu_compressed import DIM, PAGE
from benchmarks.measurement import ROUNDING, Maker, Measurement, Peer, difference, random
from kernels.backend import Backend
from kernels.compress_tokens import compress_tokens
from kernels.key_rows import KeyRows
from kernels.mix_streams import collapse_streams, expand_streams, join_streams
from kernels.rotate_append_tail import rotate_append_tail
from kernels.rotate_tail import rotate_tail

DECODES, PROMPT = 64, 2_048
HEADS, TURNED, EPS = 64, 64, 1e-6
# Tokens of an entry, whether it takes the block before too, and elements; CSA has index keys beside its entries.
COMPRESSORS = {"CSA": (4, True, DIM), "index keys": (4, True, 128), "HCA": (128, False, DIM)}
STREAMS, ITERATIONS = 4, 20
WIDTHS = (4096, 7168)


def angles(positions: int) -> torch.Tensor:
    made = torch.rand(positions, TURNED // 2, device="cuda") * 6
    return torch.stack((made.cos(), made.sin()), dim=1)


def compress(kind: str, sequences: int, new: int) -> list[Measurement]:
    """Each sequence's last tokens, behind one page that is there already."""
    ratio, overlap, dim = COMPRESSORS[kind]
    half, length = 2 * dim if overlap else dim, PAGE + max(new, PAGE)
    of_sequence = -(-length // PAGE)
    tables = torch.randperm(sequences * of_sequence, device="cuda").int().view(sequences, of_sequence)
    positions = torch.arange(length - new, length, device="cuda").repeat(sequences)
    owners = torch.arange(sequences, device="cuda").repeat_interleave(new)
    slots = tables.long()[owners, positions // PAGE] * PAGE + positions % PAGE
    rows = KeyRows(owners.int(), (positions + 1).int())
    raw, raw_pages = random(sequences * new, 2 * half), random(tables.numel(), PAGE, 2 * half)
    entry_pages = torch.zeros(tables.numel(), PAGE // ratio, dim, dtype=raw.dtype, device="cuda")
    bias, norm = random(ratio, half, dtype=torch.float32), random(dim)
    table = angles(length)

    def call(pages: torch.Tensor = entry_pages, backend: Backend = Backend.AUTO) -> None:
        compress_tokens(
            raw, raw_pages, slots, tables, rows, pages, tables,
            ratio=ratio, overlap=overlap, bias=bias, norm=norm, eps=EPS, cos_sin=table, backend=backend,
        )  # fmt: skip

    def error() -> float:
        wanted = torch.zeros_like(entry_pages)
        call(wanted, Backend.REFERENCE)
        call()
        return difference(entry_pages, wanted)

    # Rows of a block's other tokens are read from pages where they are no part of the launch.
    made = sequences * max(new // ratio, 1)
    older = made * (2 * ratio if overlap else ratio) * half * 2 if new == 1 else 0
    amount = 2e-9 * (2 * raw.numel() + older + made * dim)
    return [Measurement("compress_tokens", f"{kind}, {sequences} x {new}", amount, call, error, ROUNDING)]


def append(tokens: int) -> list[Measurement]:
    """Of queries only what turns is touched."""
    q, k, norm = random(tokens, HEADS, DIM), random(tokens, DIM), random(DIM)
    pages, slots = random(-(-tokens // PAGE), PAGE, DIM), torch.randperm(tokens, device="cuda")
    positions, table = torch.randint(0, 8192, (tokens,), device="cuda"), angles(8192)

    def error() -> float:
        made = [(q.clone(), torch.zeros_like(pages)) for _ in range(2)]
        for (turned, filled), backend in zip(made, (Backend.AUTO, Backend.REFERENCE), strict=True):
            rotate_append_tail(turned, k, positions, table, filled, slots, norm=norm, eps=EPS, backend=backend)
        return max(difference(*pair) for pair in zip(*made, strict=True))

    call = partial(rotate_append_tail, q, k, positions, table, pages, slots, norm=norm, eps=EPS)
    amount = 4e-9 * tokens * (HEADS * TURNED + DIM)
    return [Measurement("rotate_append_tail", f"{tokens} x {HEADS} heads", amount, call, error, ROUNDING)]


def turn(tokens: int) -> list[Measurement]:
    x, table = random(tokens, HEADS, DIM), angles(8192)
    positions = torch.randint(0, 8192, (tokens,), device="cuda")

    def call(backend: Backend = Backend.AUTO) -> torch.Tensor:
        rotate_tail(x, positions, table, inverse=True, backend=backend)
        return x

    def error() -> float:
        before = x.clone()
        got = call().clone()
        x.copy_(before)
        return difference(got, call(Backend.REFERENCE))

    amount, name = 4e-9 * tokens * HEADS * TURNED, f"{tokens} x {HEADS} heads"
    peers = (Peer("torch", partial(call, Backend.REFERENCE), amount),)
    return [Measurement("rotate_tail", name, amount, call, error, ROUNDING, peers)]


def mix(tokens: int, hidden: int) -> list[Measurement]:
    streams, out = random(tokens, STREAMS, hidden), random(tokens, hidden)
    width = (2 + STREAMS) * STREAMS
    mixes, base = random(tokens, width, dtype=torch.float32), random(width, dtype=torch.float32)
    scale = torch.rand(3, device="cuda") + 0.5
    ends = (streams, mixes[:, :STREAMS], base[:STREAMS].clone(), scale[:1])
    _, post, comb = collapse_streams(streams, mixes, base, scale, eps=EPS, num_iters=ITERATIONS)

    def collapse(backend: Backend = Backend.AUTO) -> torch.Tensor:
        made = collapse_streams(streams, mixes, base, scale, eps=EPS, num_iters=ITERATIONS, backend=backend)
        return torch.cat((made.x.float().flatten(), made.post.flatten(), made.comb.flatten()))

    def measured(op: str, rows: int, run: partial[Any], error: partial[float]) -> Measurement:
        amount = 2e-9 * rows * tokens * hidden
        peers = (Peer("torch", partial(run, backend=Backend.REFERENCE), amount),)
        return Measurement(op, f"{tokens} x {STREAMS} x {hidden}", amount, run, error, ROUNDING, peers)

    def error_of(run: partial[torch.Tensor]) -> float:
        return difference(run(), run(backend=Backend.REFERENCE))

    collapse_alone = partial(collapse_streams, streams, mixes, base, scale, eps=EPS, num_iters=ITERATIONS)
    expand, join = partial(expand_streams, out, streams, post, comb), partial(join_streams, *ends, eps=EPS)
    return [
        measured("collapse_streams", STREAMS + 1, collapse_alone, partial(error_of, partial(collapse))),
        measured("expand_streams", 2 * STREAMS + 1, expand, partial(error_of, expand)),
        measured("join_streams", STREAMS + 1, join, partial(error_of, join)),
    ]


AREAS: dict[str, tuple[Maker, ...]] = {
    "compressed_rows": (
        *(partial(compress, kind, *size) for kind in COMPRESSORS for size in ((DECODES, 1), (1, PROMPT))),
        *(partial(make, tokens) for make in (append, turn) for tokens in (DECODES, PROMPT)),
    ),
    "streams": tuple(partial(mix, tokens, hidden) for hidden in WIDTHS for tokens in (DECODES, PROMPT)),
}
