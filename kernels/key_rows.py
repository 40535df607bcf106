"""Rows of queries over the keys of their sequences: the sequence of each one, and how many keys it sees.

rows         | decode: one of each sequence | new tokens of prompt 0 | of prompt 1 | padding |
sequences      0  1  2                        3  3  3  3               4  4          -1
num_keys       all of its sequence's          cached + 1, + 2, ...     ...            0
"""

from typing import NamedTuple

import torch

from kernels._checks import check_block_tables, check_lengths, num_sequences
from kernels.errors import KernelArgumentError

__all__ = ["KeyRows", "append_rows", "check_key_rows", "key_rows", "positions_in_pages"]


class KeyRows(NamedTuple):
    """int32 [num_rows] each. A row sees positions 0 .. num_keys - 1 of its sequence, which is a row of block tables;
    one that sees none is padding. Rows of a sequence are neighbours, in the order of their positions."""

    sequences: torch.Tensor
    num_keys: torch.Tensor

    def part(self, rows: slice) -> "KeyRows":
        return KeyRows(self.sequences[rows], self.num_keys[rows])

    def entries(self, ratio: int) -> "KeyRows":
        """Returns the rows over compressed entries, each of `ratio` tokens; those of whole blocks are seen."""
        return KeyRows(self.sequences, self.num_keys // ratio)


def key_rows(
    decode_seqlens_k: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, num_rows: int
) -> KeyRows:
    """Returns the rows of a launch, by work on the device alone.

    decode_seqlens_k int32 [num_decode]: the keys of sequences with one row each, which come first. cu_seqlens_q and
    cu_seqlens_k int32 [num_prompts + 1] count the new tokens, and all keys, of the sequences behind them. What is left
    of num_rows is padding.
    """
    num_decode, num_prompts = decode_seqlens_k.shape[0], num_sequences(cu_seqlens_q, "cu_seqlens_q")
    check_lengths("decode_seqlens_k", decode_seqlens_k, num_decode, cu_seqlens_q.device)
    check_lengths("cu_seqlens_q", cu_seqlens_q, num_prompts + 1, cu_seqlens_q.device)
    check_lengths("cu_seqlens_k", cu_seqlens_k, num_prompts + 1, cu_seqlens_q.device)
    if num_rows < num_decode:
        raise KernelArgumentError(f"num_rows: must be at least the {num_decode} that decode, got {num_rows}")
    device = cu_seqlens_q.device
    sequences = torch.arange(num_rows, dtype=torch.int32, device=device)
    num_keys = torch.zeros(num_rows, dtype=torch.int32, device=device)
    num_keys[:num_decode] = decode_seqlens_k
    if num_rows > num_decode and num_prompts:
        row = sequences[: num_rows - num_decode].clone()
        # Behind the last one that ends at or before the row: a prompt without new tokens has no row.
        prompt = torch.searchsorted(cu_seqlens_q[1:], row, right=True)
        live, prompt = prompt < num_prompts, prompt.clamp(max=num_prompts - 1)
        keys = cu_seqlens_k.diff()[prompt] - (cu_seqlens_q[1:][prompt] - 1 - row)
        sequences[num_decode:] = torch.where(live, prompt + num_decode, -1).to(torch.int32)
        num_keys[num_decode:] = torch.where(live, keys, 0)
    else:
        sequences[num_decode:] = -1
    return KeyRows(sequences, num_keys)


def check_key_rows(rows: KeyRows, num_rows: int, block_tables: torch.Tensor, device: torch.device) -> None:
    """Refuses rows that are not of this many queries, and block tables that no kernel can read."""
    check_lengths("rows.sequences", rows.sequences, num_rows, device)
    check_lengths("rows.num_keys", rows.num_keys, num_rows, device)
    check_block_tables(block_tables, block_tables.shape[0], device)


def positions_in_pages(pages: torch.Tensor, table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Returns what pages [num_pages, page_tokens, ...] hold at these positions of one sequence, by plain indexing."""
    page_tokens = pages.shape[1]
    return pages[table.long()[positions // page_tokens], positions % page_tokens]


def append_rows(rows: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
    """Slot slots[t] of pages [num_pages, page_tokens, width] = rows[t]; a negative slot is skipped."""
    kept = slots >= 0
    pages[slots[kept] // pages.shape[1], slots[kept] % pages.shape[1]] = rows[kept]
