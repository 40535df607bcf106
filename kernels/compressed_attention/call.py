"""The checked arguments of one compressed_attention call."""

from typing import NamedTuple

import torch

from kernels.key_rows import KeyRows

__all__ = ["CompressedCall", "EntryPages", "most_keys"]


class EntryPages(NamedTuple):
    """Compressed entries in pages, each of `ratio` tokens, and which of those that it sees a row reads."""

    pages: torch.Tensor
    tables: torch.Tensor
    ratio: int
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


def most_keys(call: CompressedCall) -> int:
    """Returns a bound of the keys of a row's list, from what the host knows."""
    entries = call.entries
    if entries is None:
        return call.window_tokens
    room = entries.tables.shape[1] * entries.pages.shape[1]
    return call.window_tokens + (room if entries.chosen is None else min(room, entries.chosen.shape[1]))
