"""Pages from host memory to SGLang's device pools, one of the model's layers after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from adapters.sglang.device_pools import DevicePool


class Load(NamedTuple):
    """Pages of one pool, by its number, and the rows that they go to."""

    pool: int
    pages: list[memoryview]
    indices: torch.Tensor


class Loads:
    def __init__(self, pools: Sequence[DevicePool]) -> None:
        self._pools = pools
        self.num_layers = max(layer for pool in pools for layer in pool.layers) + 1

    def layers(self, loads: Sequence[Load]) -> Iterator[int]:
        """Yields each layer when it is written, or on a GPU when all of it is in the current stream."""
        staged = []
        for number, pool in enumerate(self._pools):
            mine = [load for load in loads if load.pool == number]
            if mine:
                stack = pool.pages.staged([page for load in mine for page in load.pages])
                staged.append((pool, torch.cat([load.indices for load in mine]), stack))
        for layer in range(self.num_layers):
            for pool, indices, stack in staged:
                if layer in pool.layers:
                    pool.pages.write_layer(pool.layers[layer], indices, stack)
            yield layer
