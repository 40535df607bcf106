"""Tensors in memory as a source for a decoder's weights."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import NamedTuple

import torch

from worker_service.model.layer_weights import ExpertWeight
from worker_service.model.weight_formats import ExpertFormat
from worker_service.model.weights import filled_stacks


class StoredAs(NamedTuple):
    """What experts are made into, and how one's matrix is: its values and scales."""

    made: ExpertFormat
    quantised: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class LoadedTensors:
    """Tensors of a mapping. Each is returned once, and forgotten."""

    def __init__(self, tensors: MutableMapping[str, torch.Tensor], experts: StoredAs | None = None) -> None:
        self._tensors = tensors
        self._experts = experts

    def take(self, name: str, *shape: int, wide: bool = False) -> torch.Tensor:
        tensor = self._tensors.pop(name)
        assert tensor.shape == shape, f"{name}: {list(tensor.shape)} was loaded where {list(shape)} was expected"
        return tensor

    def take_experts(self, names: Sequence[Sequence[str]], rows: int, columns: int) -> ExpertWeight:
        if (stored := self._experts) is None:
            return filled_stacks(names, lambda name: (self.take(name, rows, columns),))[0]
        return stored.made(*filled_stacks(names, lambda name: stored.quantised(self.take(name, rows, columns))))

    def take_transposed_experts(self, name: str, num_experts: int, rows: int, columns: int) -> ExpertWeight:
        weight = self.take(name, num_experts, columns, rows).transpose(1, 2).contiguous()
        if (stored := self._experts) is None:
            return weight
        return stored.made(*map(torch.stack, zip(*map(stored.quantised, weight), strict=True)))

    def stored_alike(self, names: Sequence[str], rows: int, columns: int) -> bool:
        return True

    def holds(self, name: str) -> bool:
        return name in self._tensors
