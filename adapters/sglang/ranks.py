"""What the ranks of one engine decide together: SGLang's schedulers run in step, and call the linker in one order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Least = Callable[[Sequence[int]], list[int]]


def least_of(group: Any) -> Least:
    """Returns a function that every rank calls with as many numbers; it returns the least of each over the ranks.

    `group`: a group of torch.distributed that reduces on CPUs; None where there is one rank.
    """
    if group is None or torch.distributed.get_world_size(group) == 1:
        return list

    def least(numbers: Sequence[int]) -> list[int]:
        told = torch.tensor(numbers)
        torch.distributed.all_reduce(told, op=torch.distributed.ReduceOp.MIN, group=group)
        found: list[int] = told.tolist()
        return found

    return least
