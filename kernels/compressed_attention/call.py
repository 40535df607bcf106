"""The checked arguments of one compressed_attention call."""

from typing import NamedTuple

import torch

from kernels.key_rows import KeyRows

__all__ = ["CompressedCall", "EntryPages"]


class EntryPages(NamedTuple):
    """Compressed entries in pages, how many of them each row sees, int32 [num_tokens], and which of these it reads."""

    pages: torch.Tensor
    tables: torch.Tensor
    num_seen: torch.Tensor
    chosen: torch.Tensor | None


class CompressedCall(NamedTuple):
    """Queries, a window over pages, and compressed entries where there are any."""

    q: torch.Tensor
    window_pages: torch.Tensor
    window_tables: torch.Tensor
    rows: KeyRows
    sinks: torch.Tensor
    scale: float
    window_tokens: int
    entries: EntryPages | None
