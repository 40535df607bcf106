"""Where a family takes its tensors from: by name and shape, from a checkpoint that is loaded, or to list them.

A family says its names and shapes once, in the order it takes them. `expected_tensors` runs that with `NamesOnly`.
What is stored under one of two names asks `holds`.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import NamedTuple, Protocol

import torch


class TensorSource(Protocol):
    """`take` returns the tensor of that name; `shape` is what the checkpoint must hold. It has the model's dtype, or
    fp32 where `wide` says so. `take_stack` returns several of one shape as [len(names), *shape], which are never in
    memory twice. `holds` says whether a tensor of that name is there."""

    def take(self, name: str, *shape: int, wide: bool = False) -> torch.Tensor: ...

    def take_stack(self, names: Sequence[str], *shape: int) -> torch.Tensor: ...

    def holds(self, name: str) -> bool: ...


class Expected(NamedTuple):
    """What a checkpoint must hold under a name, and whether it is loaded as fp32."""

    shape: tuple[int, ...]
    wide: bool = False


class NamesOnly:
    """Notes what is taken; the tensors have a shape and no memory. `held` are the names that a checkpoint has."""

    def __init__(self, held: Container[str] = ()) -> None:
        self.expected: dict[str, Expected] = {}
        self._held = held

    def take(self, name: str, *shape: int, wide: bool = False) -> torch.Tensor:
        self.expected[name] = Expected(shape, wide)
        return torch.empty(shape, device="meta")

    def take_stack(self, names: Sequence[str], *shape: int) -> torch.Tensor:
        for name in names:
            self.take(name, *shape)
        return torch.empty(len(names), *shape, device="meta")

    def holds(self, name: str) -> bool:
        return name in self._held
