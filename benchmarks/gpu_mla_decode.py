"""What is measured of latent attention's decode steps: heads of one card or a part of them, lengths of all kinds."""

from __future__ import annotations

import random
from functools import partial
from importlib import import_module
from itertools import product
from typing import Any

import torch

from benchmarks.gpu_layers import in_a_model
from benchmarks.gpu_mla import BF16, LATENT, PAGE, ROPE, SCALE, WIDTH
from benchmarks.gpu_peers import made_by_flashinfer, workspace
from benchmarks.measurement import GEMM, READ, Maker, Measurement, Peer, against_reference
from benchmarks.measurement import random as random_rows
from kernels.backend import Backend
from kernels.mla_decode import MlaDecodePlan, mla_decode
from tests.kernels.inputs import running_sums

DECODES = ((128, 64, 8192), (16, 64, 8192), (128, 1, 8192), (16, 16, 4096))
# Of batches whose cuts follow their load, which `fast` asks for.
HEADS = (8, 16, 32, 64, 128)
SEQUENCES = (1, 16, 64)
# A page holds 64 latents: on and off the grid.
LENGTHS = (5000, 8192, 8193)
LAYERS = 16
# One sequence of 40,000 latents, among 15 of 500.
LONG_AMONG_SHORT = [40000, *[500] * 15]


def decode(heads: int, sequences: int, length: int, *, by_load: bool = False) -> list[Measurement]:
    return decode_lengths(heads, f"B{sequences} L{length}", [length] * sequences, by_load=by_load)


def decode_mixed(heads: int, sequences: int) -> list[Measurement]:
    """Lengths from 1 to 8,192, the same in every run."""
    rng = random.Random(sequences)
    lengths = [rng.randint(1, 8192) for _ in range(sequences)]
    return decode_lengths(heads, f"B{sequences} L1-8192", lengths, by_load=True)


def decode_long_among_short(heads: int) -> list[Measurement]:
    longest, *short = LONG_AMONG_SHORT
    name = f"B{len(LONG_AMONG_SHORT)} L{short[0]}, one {longest}"
    return decode_lengths(heads, name, LONG_AMONG_SHORT, by_load=True)


def decode_lengths(heads: int, name: str, lengths: list[int], *, by_load: bool) -> list[Measurement]:
    """TFLOP/s of many heads, GB/s of latents read where memory bounds the few."""
    pages, tables, counts = paged(lengths)
    seqlens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    q = random_rows(len(lengths), heads, WIDTH)
    plan = MlaDecodePlan(len(lengths), max(counts) * PAGE, heads, by_load=by_load)
    plan.prepare(seqlens)
    out = torch.full((len(lengths), heads, LATENT), float("nan"), dtype=BF16, device="cuda")

    def call(backend: Backend = Backend.AUTO) -> torch.Tensor:
        if backend is Backend.REFERENCE:
            return mla_decode(q, pages, tables, seqlens, scale=SCALE, backend=backend)
        return mla_decode(q, pages, tables, seqlens, scale=SCALE, plan=plan, out=out)

    many, latents = heads > 16, sum(lengths)
    amount = 2e-12 * latents * heads * (WIDTH + LATENT) if many else 2e-9 * latents * WIDTH
    peers = absorbed_peer(q, pages, tables, counts, seqlens, amount)
    case = f"{heads} heads {name}" + (", by load" if by_load else "")
    return against_reference("mla_decode", case, amount, call, GEMM if many else READ, peers)


def paged(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Returns latent pages, a table of them in random order, and the pages of each sequence."""
    counts = [-(-length // PAGE) for length in lengths]
    rows = torch.randperm(sum(counts), device="cuda").int().split(counts)
    tables = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    return random_rows(sum(counts), PAGE, WIDTH), tables, counts


@made_by_flashinfer
def absorbed_peer(
    _flashinfer: Any,
    q: torch.Tensor,
    pages: torch.Tensor,
    tables: torch.Tensor,
    counts: list[int],
    seqlens: torch.Tensor,
    amount: float,
) -> tuple[Peer, ...]:
    """FlashInfer's absorbed decode."""
    wrapper = import_module("flashinfer.mla").BatchMLAPagedAttentionWrapper(workspace(), backend="fa3")
    queries, bounds = running_sums([1] * len(counts), "cuda"), running_sums(counts, "cuda")
    ids = torch.cat([row[:count] for row, count in zip(tables, counts, strict=True)])
    sizes = (q.shape[1], LATENT, ROPE, PAGE)
    wrapper.plan(queries, bounds, ids, seqlens, *sizes, False, SCALE, BF16, BF16)
    parts = [rows.contiguous() for rows in q.split([LATENT, ROPE], dim=-1)]
    latents = [rows.contiguous() for rows in pages.split([LATENT, ROPE], dim=-1)]
    return (Peer("flashinfer", partial(wrapper.run, *parts, *latents, return_lse=False), amount),)


AREAS: dict[str, tuple[Maker, ...]] = {
    "mla_decode": (
        *(partial(decode, *sizes) for sizes in DECODES),
        *(partial(decode, *sizes, by_load=True) for sizes in product(HEADS, SEQUENCES, LENGTHS)),
        *(partial(decode_mixed, heads, sequences) for heads in HEADS for sequences in (16, 64)),
        *(partial(decode_long_among_short, heads) for heads in HEADS),
    ),
    "mla_in_model": tuple(
        partial(in_a_model, partial(decode, heads, 64, 8192, by_load=True), LAYERS) for heads in (16, 128)
    ),
}
