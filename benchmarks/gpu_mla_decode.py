"""What is measured of latent attention's decode steps: heads of one card or a part of them, lengths of all kinds."""

from __future__ import annotations

import random
from functools import partial
from importlib import import_module
from itertools import product
from typing import Any

import torch

from benchmarks.gpu_mla import BF16, LATENT, PAGE, ROPE, SCALE, WIDTH
from benchmarks.gpu_peers import made_by_flashinfer, workspace
from benchmarks.measurement import GEMM, READ, Maker, Measurement, Peer, against_reference
from benchmarks.measurement import random as random_rows
from kernels.backend import Backend
from kernels.mla_decode import MlaDecodePlan, mla_decode
from tests.kernels.inputs import running_sums

HEADS = (8, 16, 32, 64, 128)
SEQUENCES = (1, 16, 64)
# A page holds 64 latents: on and off the grid.
LENGTHS = (5000, 8192, 8193)
# One sequence of 40,000 latents, among 15 of 500.
LONG_AMONG_SHORT = [40000, *[500] * 15]


def decode(heads: int, sequences: int, length: int, *, by_load: bool = False) -> list[Measurement]:
    return decode_lengths(heads, f"B{sequences} L{length}", [length] * sequences, by_load=by_load)


def decode_mixed(heads: int, sequences: int, *, by_load: bool = False) -> list[Measurement]:
    """Lengths from 1 to 8,192, the same in every run."""
    rng = random.Random(sequences)
    lengths = [rng.randint(1, 8192) for _ in range(sequences)]
    return decode_lengths(heads, f"B{sequences} L1-8192", lengths, by_load=by_load)


def decode_long_among_short(heads: int, *, by_load: bool = False) -> list[Measurement]:
    longest, *short = LONG_AMONG_SHORT
    name = f"B{len(LONG_AMONG_SHORT)} L{short[0]}, one {longest}"
    return decode_lengths(heads, name, LONG_AMONG_SHORT, by_load=by_load)


class Step:
    """Sequences that decode: their block tables, lengths and plan, which layers share."""

    def __init__(self, heads: int, lengths: list[int], *, by_load: bool) -> None:
        self.heads = heads
        self.counts = [-(-length // PAGE) for length in lengths]
        ids = torch.randperm(sum(self.counts), device="cuda").int().split(self.counts)
        self.tables = torch.nn.utils.rnn.pad_sequence(list(ids), batch_first=True)
        self.seqlens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        self.plan = MlaDecodePlan(len(lengths), max(self.counts) * PAGE, heads, by_load=by_load)
        self.plan.prepare(self.seqlens)
        # TFLOP of many heads, GB of latents read where memory bounds the few.
        latents = sum(lengths)
        many = heads > 16
        self.amount = 2e-12 * latents * heads * (WIDTH + LATENT) if many else 2e-9 * latents * WIDTH
        self.ceiling = GEMM if many else READ


class Layer:
    """A layer's queries and latents, in pages in random order."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.q = random_rows(len(step.counts), step.heads, WIDTH)
        self.pages = random_rows(sum(step.counts), PAGE, WIDTH)
        self._out = torch.full((*self.q.shape[:2], LATENT), float("nan"), dtype=BF16, device="cuda")

    def __call__(self, backend: Backend = Backend.AUTO) -> torch.Tensor:
        where = (self.q, self.pages, self.step.tables, self.step.seqlens)
        if backend is Backend.REFERENCE:
            return mla_decode(*where, scale=SCALE, backend=backend)
        return mla_decode(*where, scale=SCALE, plan=self.step.plan, out=self._out)


def decode_lengths(heads: int, name: str, lengths: list[int], *, by_load: bool) -> list[Measurement]:
    """TFLOP/s of many heads, GB/s of latents read of few."""
    step = Step(heads, lengths, by_load=by_load)
    layer = Layer(step)
    case = f"{heads} heads {name}" + (", by load" if by_load else "")
    return against_reference("mla_decode", case, step.amount, layer, step.ceiling, flashinfer_layers([layer]))


@made_by_flashinfer
def flashinfer_layers(_flashinfer: Any, layers: list[Layer]) -> tuple[Peer, ...]:
    """Returns FlashInfer's absorbed decode of each layer of a step, planned once."""
    step = layers[0].step
    wrapper = import_module("flashinfer.mla").BatchMLAPagedAttentionWrapper(workspace(), backend="fa3")
    queries, bounds = running_sums([1] * len(step.counts), "cuda"), running_sums(step.counts, "cuda")
    ids = torch.cat([row[:count] for row, count in zip(step.tables, step.counts, strict=True)])
    sizes = (step.heads, LATENT, ROPE, PAGE)
    wrapper.plan(queries, bounds, ids, step.seqlens, *sizes, False, SCALE, BF16, BF16)
    peers = []
    for layer in layers:
        parts = [part.contiguous() for rows in (layer.q, layer.pages) for part in rows.split([LATENT, ROPE], dim=-1)]
        peers.append(Peer("flashinfer", partial(wrapper.run, *parts, return_lse=False), step.amount))
    return tuple(peers)


def all_of(*, by_load: bool) -> tuple[Maker, ...]:
    """Returns what is measured of batches that are cut by their load, as `fast` asks, or leaf by leaf, as `batch`."""
    kind = partial(partial, by_load=by_load)
    return (
        *(kind(decode, *sizes) for sizes in product(HEADS, SEQUENCES, LENGTHS)),
        *(kind(decode_mixed, heads, sequences) for heads in HEADS for sequences in (16, 64)),
        *(kind(decode_long_among_short, heads) for heads in HEADS),
    )


AREAS: dict[str, tuple[Maker, ...]] = {
    "mla_decode": (*all_of(by_load=False), partial(decode, 16, 16, 4096)),
    "mla_decode_by_load": all_of(by_load=True),
}
