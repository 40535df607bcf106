"""Where a family takes its tensors from: by name and shape, from a checkpoint that is loaded, or to list them.

A family says its names and shapes once, in the order it takes them. `expected_tensors` runs that with `NamesOnly`.
What is stored under one of two names asks `holds`.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import chain
from typing import NamedTuple, Protocol

import torch

from worker_service.model.layer_weights import ExpertWeight


class TensorSource(Protocol):
    """`take` returns the tensor of that name; `shape` is what the checkpoint must hold. It has the model's dtype, or
    fp32 where `wide` says so. `holds` says whether a tensor of that name is there.

    Experts come in the model's dtype or as they are stored, and are never in memory twice. `take_experts` returns
    [num_experts, len(names[0]) * rows, columns] of matrices [rows, columns]: `names` has those of each expert, which
    become one, row under row. `take_transposed_experts` returns [num_experts, rows, columns] of one tensor
    [num_experts, columns, rows]. `stored_alike` says whether matrices of these names are stored in one format, so that
    they can be experts of one tensor.
    """

    def take(self, name: str, *shape: int, wide: bool = False) -> torch.Tensor: ...

    def take_experts(self, names: Sequence[Sequence[str]], rows: int, columns: int) -> ExpertWeight: ...

    def take_transposed_experts(self, name: str, num_experts: int, rows: int, columns: int) -> ExpertWeight: ...

    def stored_alike(self, names: Sequence[str], rows: int, columns: int) -> bool: ...

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

    def take_experts(self, names: Sequence[Sequence[str]], rows: int, columns: int) -> torch.Tensor:
        for name in chain.from_iterable(names):
            self.take(name, rows, columns)
        return torch.empty(len(names), len(names[0]) * rows, columns, device="meta")

    def take_transposed_experts(self, name: str, num_experts: int, rows: int, columns: int) -> torch.Tensor:
        return self.take(name, num_experts, columns, rows).transpose(1, 2)

    def stored_alike(self, names: Sequence[str], rows: int, columns: int) -> bool:
        return True

    def holds(self, name: str) -> bool:
        return name in self._held
