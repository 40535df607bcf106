"""Layers behind each other in one graph, as a model runs them.

A layer that is timed alone waits for nothing before it. In turns with another kind it finds the clock that the other
one left, and a card that is bound by its power takes tens of milliseconds to leave that.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from benchmarks.measurement import Maker, Measurement, Peer, Work


def in_a_model(make: Maker, num_layers: int) -> list[Measurement]:
    """Returns what `make` measures, of `num_layers` layers with tensors of their own, so that no cache holds any."""
    layers = [make()[0] for _ in range(num_layers)]
    first, *_ = layers
    amount = first.amount * num_layers
    peers = zip(*(layer.peers for layer in layers), strict=True)
    return [
        replace(
            first,
            case=f"{first.case}, {num_layers} layers",
            amount=amount,
            run=partial(run_all, [layer.run for layer in layers]),
            error=lambda: max(layer.error() for layer in (first, layers[-1])),
            peers=tuple(Peer(same[0].name, partial(run_all, [peer.run for peer in same]), amount) for same in peers),
        )
    ]


def run_all(works: list[Work]) -> None:
    for work in works:
        work()
