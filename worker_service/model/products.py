"""Which GEMM multiplies which rows of a launch: the place where a row's bits are kept from depending on its mates.

Knows no layer, no sequence and no attention.

                    decode rows             prefill and padding rows
    batch, CUDA     skinny_linear           linear: the library's GEMM where it is row-stable, else the tiled one
    fast, CUDA      one GEMM for the launch: skinny_linear when it only decodes, else the library's
    CPU             one GEMM of torch for the launch

Decode rows have a GEMM of their own in `batch` even when a prompt shares their launch: so a token's bits are the same
whatever else is computed beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch

from kernels.linear import LEAST_ROWS, Route, unstable_shapes
from kernels.linear import linear as stable_linear
from kernels.skinny_linear import MAX_ROWS, SkinnyPlan, fits_skinny, skinny_linear
from worker_service.model.llama import Linear, Multiply

# torch's GEMM on a CPU keeps a row's bits from this many rows on.
LEAST_CPU_ROWS = 16
MOST_PADDING = max(LEAST_ROWS, LEAST_CPU_ROWS)


class Invariance(Enum):
    """BATCH: a row's bits depend on no other row of its launch. FAST: on whatever is quickest."""

    BATCH = "batch"
    FAST = "fast"


class Products:
    """Made once for a model; gives each launch its `Multiply`."""

    def __init__(self, linears: Sequence[Linear], invariance: Invariance, max_decode_rows: int, max_rows: int) -> None:
        weights = [entry.weight for entry in linears]
        on_cuda = weights[0].is_cuda
        self._stays_apart = invariance is Invariance.BATCH
        self._least_rows = (LEAST_ROWS if self._stays_apart else 1) if on_cuda else LEAST_CPU_ROWS
        self._plan: SkinnyPlan | None = None
        if on_cuda and max_decode_rows <= MAX_ROWS and all(map(fits_skinny, weights)):
            self._plan = SkinnyPlan(max(weight.shape[0] for weight in weights), weights[0].device)
        self.tiled_shapes = unstable_shapes(weights, max_rows) if self._stays_apart else frozenset()

    def num_padding(self, num_decode: int, num_rows: int) -> int:
        """Rows to append, so that the library's GEMM gets as many as it needs to keep a row's bits."""
        others = num_rows - self._num_skinny(num_decode, num_rows)
        return max(self._least_rows - others, 0) if others else 0

    def of_launch(self, num_decode: int, num_rows: int) -> Multiply:
        """For a launch of num_rows rows, padding not counted, whose first num_decode ones decode."""
        skinny = self._num_skinny(num_decode, num_rows)

        def multiply(x: torch.Tensor, linear: Linear) -> torch.Tensor:
            weight, bias = linear
            if not skinny or self._plan is None:
                return stable_linear(x, weight, bias, route=self._route(weight))
            out = x.new_empty(x.shape[0], weight.shape[0])
            skinny_linear(x[:skinny], weight, bias, plan=self._plan, out=out[:skinny])
            if skinny < x.shape[0]:
                stable_linear(x[skinny:], weight, bias, route=self._route(weight), out=out[skinny:])
            return out

        return multiply

    def _num_skinny(self, num_decode: int, num_rows: int) -> int:
        if self._plan is None or num_decode > MAX_ROWS:
            return 0
        return num_decode if self._stays_apart or num_decode == num_rows else 0

    def _route(self, weight: torch.Tensor) -> Route:
        return Route.TILED if tuple(weight.shape) in self.tiled_shapes else Route.LIBRARY
