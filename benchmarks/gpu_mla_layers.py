"""Latent attention inside layers of DeepSeek V3's shapes that decode: projections, attention, dense MLP.

Layers run one behind the other in one graph, with weights and latents of their own; lengths, block tables and the plan
are the step's. What attention takes is the time of all, less that of the same layers without it.
"""

from __future__ import annotations

from functools import partial
from itertools import chain

from benchmarks.gpu_layers import run_all
from benchmarks.gpu_mla import LATENT, NOPE, ROPE, VALUE, WIDTH
from benchmarks.gpu_mla_decode import Layer, Step, flashinfer_layers
from benchmarks.measurement import OUT_TOLERANCE, Maker, Measurement, Peer, Work, random, row_error
from kernels.backend import Backend
from kernels.head_linear import head_linear
from kernels.linear import linear

HIDDEN, Q_RANK, MLP, ALL_HEADS = 7168, 1536, 18432, 128
LAYERS, SEQUENCES, LENGTH = 16, 64, 8192
HEADS = (16, 128)


def product(outputs: int, depth: int) -> Work:
    """Reads a projection's weights."""
    return partial(linear, random(SEQUENCES, depth), random(outputs, depth))


def product_by_head(heads: int, depth: int, outputs: int) -> Work:
    """Into the latents' space, or out of it."""
    tail = ROPE if outputs == LATENT else 0
    rows, out = random(SEQUENCES, heads, depth + tail), random(SEQUENCES, heads, outputs + tail)
    return partial(head_linear, rows, random(heads, depth, outputs), out)


def before(heads: int) -> list[Work]:
    """Returns what makes a layer's queries and new latents."""
    sizes = ((Q_RANK, HIDDEN), (heads * (NOPE + ROPE), Q_RANK), (WIDTH, HIDDEN))
    return [*(product(*size) for size in sizes), product_by_head(heads, NOPE, LATENT)]


def behind(heads: int) -> list[Work]:
    """Returns what follows a layer's attention; fewer heads than all are the part of one card among several."""
    inner = MLP * heads // ALL_HEADS
    sizes = ((HIDDEN, heads * VALUE), (2 * inner, HIDDEN), (HIDDEN, inner))
    return [product_by_head(heads, LATENT, VALUE), *(product(*size) for size in sizes)]


def inside_layers(heads: int) -> list[Measurement]:
    step = Step(heads, [LENGTH] * SEQUENCES, by_load=True)
    layers = [Layer(step) for _ in range(LAYERS)]
    around = [(before(heads), behind(heads)) for _ in layers]

    def all_with(attentions: list[Work]) -> Work:
        layered = zip(around, attentions, strict=True)
        return partial(run_all, list(chain.from_iterable((*first, own, *last) for (first, last), own in layered)))

    def error() -> float:
        return max(row_error(layer(), layer(Backend.REFERENCE)) for layer in (layers[0], layers[-1]))

    amount = step.amount * LAYERS
    peers = flashinfer_layers(layers)
    return [
        Measurement(
            "mla_decode",
            f"{heads} heads B{SEQUENCES} L{LENGTH}, by load, in {LAYERS} layers",
            amount,
            all_with(list(layers)),
            error,
            OUT_TOLERANCE,
            peers=(Peer("flashinfer", all_with([peer.run for peer in peers]), amount),) if peers else (),
            ceiling=step.ceiling,
            beside=partial(run_all, [work for parts in around for part in parts for work in part]),
        )
    ]


AREAS: dict[str, tuple[Maker, ...]] = {"mla_in_layers": tuple(partial(inside_layers, heads) for heads in HEADS)}
