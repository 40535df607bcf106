"""Where a family takes its tensors from: by name and shape, from a checkpoint that is loaded, or to list them.

A family says its names and shapes once, in the order it takes them. `expected_shapes` runs that with `NamesOnly`.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Protocol

import torch


class TensorSource(Protocol):
    """`take` returns the tensor of that name; `shape` is what the checkpoint must hold."""

    def take(self, name: str, *shape: int) -> torch.Tensor: ...


class LoadedTensors:
    """Hands out each tensor once, and forgets it: what fuses several never doubles the model's memory."""

    def __init__(self, tensors: MutableMapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def take(self, name: str, *shape: int) -> torch.Tensor:
        tensor = self._tensors.pop(name)
        assert tensor.shape == shape, f"{name}: {list(tensor.shape)} was loaded where {list(shape)} was expected"
        return tensor


class NamesOnly:
    """Notes what is taken; the tensors have a shape and no memory."""

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}

    def take(self, name: str, *shape: int) -> torch.Tensor:
        self.shapes[name] = shape
        return torch.empty(shape, device="meta")
