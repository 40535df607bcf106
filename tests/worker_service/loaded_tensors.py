"""Tensors in memory as a source for a decoder's weights."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence

import torch


class LoadedTensors:
    """Tensors of a mapping. Each is returned once, and forgotten."""

    def __init__(self, tensors: MutableMapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def take(self, name: str, *shape: int, wide: bool = False) -> torch.Tensor:
        tensor = self._tensors.pop(name)
        assert tensor.shape == shape, f"{name}: {list(tensor.shape)} was loaded where {list(shape)} was expected"
        return tensor

    def take_stack(self, names: Sequence[str], *shape: int) -> torch.Tensor:
        stack = self._tensors[names[0]].new_empty(len(names), *shape)
        for place, name in zip(stack, names, strict=True):
            place.copy_(self.take(name, *shape))
        return stack

    def holds(self, name: str) -> bool:
        return name in self._tensors
