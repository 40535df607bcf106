"""Inputs of sparse attention's ops: index keys and latents of ragged sequences in permuted pages, poison elsewhere.

A batch is rows of decoding sequences, then prompts behind what they have cached, then a row of padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.fp8 import E4M3, dequantise, quantise, token_scales
from kernels.key_rows import KeyRows, key_rows
from tests.kernels.inputs import POISON, running_sums


@dataclass(frozen=True, slots=True)
class SparseCase:
    """`keys` are each sequence's rows side by side, as the pages hold them: dequantised in fp64."""

    lengths: tuple[tuple[int, int], ...]
    rows: KeyRows
    keys: tuple[torch.Tensor, ...]
    pages: torch.Tensor
    scales: torch.Tensor | None
    block_tables: torch.Tensor

    @property
    def num_tokens(self) -> int:
        return self.rows.num_keys.shape[0]

    @property
    def max_keys(self) -> int:
        return max(cached + new for cached, new in self.lengths)

    def seen(self, token: int) -> torch.Tensor:
        """The keys that a row sees, fp64 on the CPU."""
        count = int(self.rows.num_keys[token])
        return self.keys[int(self.rows.sequences[token])][:count] if count else torch.zeros(0, self.keys[0].shape[1])


def make_sparse(
    lengths: Sequence[tuple[int, int]],
    width: int,
    *,
    num_decode: int = 0,
    page_tokens: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    fp8: bool = False,
    seed: int = 0,
) -> SparseCase:
    """Sequences of `cached` and then `new` tokens; the first num_decode of them have one new token each."""
    rng = torch.Generator().manual_seed(seed)
    counts = [-(-(cached + new) // page_tokens) for cached, new in lengths]
    order = (torch.randperm(sum(counts) + 2, generator=rng) + 1).int()
    pages = torch.full((sum(counts) + 3, page_tokens, width), POISON, dtype=dtype)
    scales = torch.full(pages.shape[:2], POISON)
    tables, taken, keys = torch.zeros(len(lengths), max(counts) + 1, dtype=torch.int32), 0, []
    pages = pages.to(E4M3) if fp8 else pages
    for seq, ((cached, new), count) in enumerate(zip(lengths, counts, strict=True)):
        tables[seq, :count] = order[taken : taken + count]
        taken += count
        position = torch.arange(cached + new)
        page, slot = tables[seq].long()[position // page_tokens], position % page_tokens
        made = torch.randn(cached + new, width, generator=rng).to(dtype)
        if fp8:
            scales[page, slot] = token_scales(made)
            pages[page, slot] = quantise(made, scales[page, slot].unsqueeze(1))
            made = dequantise(pages[page, slot], scales[page, slot].unsqueeze(1), torch.float32)
        else:
            pages[page, slot] = made
        keys.append(made.double())
    new_tokens, totals = [new for _, new in lengths], [cached + new for cached, new in lengths]
    assert new_tokens[:num_decode] == [1] * num_decode
    decode = torch.tensor(totals[:num_decode], dtype=torch.int32, device=device)
    cu_q, cu_k = (running_sums(values[num_decode:], device) for values in (new_tokens, totals))
    rows = key_rows(decode, cu_q, cu_k, sum(new_tokens) + 1)
    return SparseCase(
        tuple(lengths), rows, tuple(keys), pages.to(device), scales.to(device) if fp8 else None, tables.to(device)
    )


def random_rows(*size: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu", seed: int = 1) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)
