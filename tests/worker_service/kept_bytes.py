"""How much memory a launch keeps, by the shapes of what its ops take and return."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from unittest.mock import call

import pytest
import torch

TensorsOf = Callable[[Any, Any], Iterable[torch.Tensor]]


class KeptBytes:
    """Calls pass through to the ops that are watched; the largest call of each op counts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self._most: dict[str, int] = {}

    def watch(self, module: Any, name: str, tensors_of: TensorsOf) -> None:
        """Counts the tensors that `tensors_of(call, result)` names of each call of the module's op."""
        op = getattr(module, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            result = op(*args, **kwargs)
            kept = sum(tensor.nbytes for tensor in tensors_of(call(*args, **kwargs), result))
            self._most[name] = max(self._most.get(name, 0), kept)
            return result

        self._monkeypatch.setattr(module, name, watched)

    def most_bytes(self) -> int:
        return sum(self._most.values())
