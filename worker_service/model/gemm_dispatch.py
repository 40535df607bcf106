"""Which GEMM a projection of a launch uses, so that a row's bits do not depend on the other rows of the batch.

    batch, strict  the library's GEMM where it was seen to be row-stable, else the tiled one
    fast           the library's GEMM
    on Hopper      in all three few rows of 16 bits take the Gluon kernel of kernels/linear, by the shape alone
    reference      the reference GEMM for every shape (kernel_backend)
    on a CPU       oneDNN's GEMM over packed fp32 weights, row-stable from LEAST_PACKED_ROWS rows on; else torch's,
                   which is from LEAST_CPU_ROWS rows on, with AVX-512 and one thread

In `batch` and `strict` a row has the same bits in every launch, be it decoded or part of a prompt. Row-stability is a
property of this device and library, so it is tested at each start.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import torch

from kernels.backend import Backend
from kernels.linear import LEAST_PACKED_ROWS, LEAST_ROWS, Route, keeps_rows, linear
from worker_service.model.layer_weights import Linear

# torch's GEMM of plain weights keeps a row's bits from this many rows on, with AVX-512 and one thread.
LEAST_CPU_ROWS = 16
MOST_PADDING = max(LEAST_ROWS, LEAST_CPU_ROWS)

_log = logging.getLogger("worker_service")


class Invariance(Enum):
    """What a token's bits may depend on: see docs/invariance.md.

    STRICT: its tokens alone. BATCH: its tokens, and which of those before it were decoded. FAST: its launch, too.
    """

    STRICT = "strict"
    BATCH = "batch"
    FAST = "fast"


class GemmShape(NamedTuple):
    """What the library picks its kernel by, beside the number of rows: projections of one shape take one route."""

    num_outputs: int
    depth: int
    has_bias: bool
    dtype: torch.dtype


class GemmDispatch:
    """The model's `Gemm`, made once: at the start each shape is tried for row-stability."""

    def __init__(
        self, linears: Sequence[Linear], invariance: Invariance, max_rows: int, backend: Backend = Backend.AUTO
    ) -> None:
        on_cuda = linears[0].weight.is_cuda
        is_stable = invariance is not Invariance.FAST
        self._backend = backend
        self.least_rows = (LEAST_ROWS if is_stable else 1) if on_cuda else _least_cpu_rows(linears)
        self.tiled: frozenset[GemmShape] = frozenset()
        if on_cuda and is_stable and backend is not Backend.REFERENCE:
            shapes = {gemm_shape(entry): entry for entry in linears}
            self.tiled = frozenset(shape for shape, entry in shapes.items() if not keeps_rows(*entry, max_rows))
            _log.info("GEMM routes chosen", extra={"shapes": len(shapes), "tiled": sorted(map(str, self.tiled))})

    def num_padding(self, num_rows: int) -> int:
        """Returns how many rows to append, so that a GEMM gets as many as it needs to keep a row's bits."""
        return max(self.least_rows - num_rows, 0) if num_rows else 0

    def __call__(self, x: torch.Tensor, linear_: Linear) -> torch.Tensor:
        return linear(x, *linear_, route=self._route(linear_), backend=self._backend)

    def route(self, weight: torch.Tensor) -> Route:
        """Returns the route of a projection without a bias, one of those that the constructor got."""
        return self._route(Linear(weight, None))

    def _route(self, linear_: Linear) -> Route:
        return Route.TILED if gemm_shape(linear_) in self.tiled else Route.LIBRARY


def _least_cpu_rows(linears: Sequence[Linear]) -> int:
    return LEAST_PACKED_ROWS if all(entry.weight.is_mkldnn for entry in linears) else LEAST_CPU_ROWS


def gemm_shape(entry: Linear) -> GemmShape:
    return GemmShape(entry.weight.shape[0], entry.weight.shape[1], entry.bias is not None, entry.weight.dtype)
