"""The checked arguments of one index_logits call."""

from typing import NamedTuple

import torch

from kernels.key_rows import KeyRows

__all__ = ["IndexLogitsCall"]


class IndexLogitsCall(NamedTuple):
    """Queries and their heads' weights, pages of keys, and which keys each query sees."""

    q: torch.Tensor
    weights: torch.Tensor
    pages: torch.Tensor
    block_tables: torch.Tensor
    rows: KeyRows
    max_keys: int
    scales: torch.Tensor | None
    least_keys: int
