"""Inputs of compressed attention: windows and entries of ragged sequences in permuted pages, poison elsewhere.

A batch is rows of decoding sequences, then prompts behind what they have cached, then a row of padding. Of what is
cached a window's pages hold what the first new token reads; entries are there for whole blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.backend import Backend
from kernels.compressed_attention import compressed_attention
from kernels.key_rows import KeyRows, key_rows, positions_in_pages
from kernels.top_k import top_k
from tests.kernels.inputs import POISON, running_sums

SCALE = 0.2


@dataclass(frozen=True, slots=True)
class CompressedShape:
    """What every sequence of a batch has in common; k is how many entries are chosen (0: all that are seen)."""

    heads: int = 4
    dim: int = 48
    page_tokens: int = 16
    window_tokens: int = 20
    ratio: int = 4
    k: int = 0
    dtype: torch.dtype = torch.bfloat16
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class CompressedCase:
    shape: CompressedShape
    rows: KeyRows
    q: torch.Tensor
    sinks: torch.Tensor
    window_pages: torch.Tensor
    window_tables: torch.Tensor
    entry_pages: torch.Tensor
    entry_tables: torch.Tensor
    chosen: torch.Tensor | None

    def run(self, backend: Backend, part: slice = slice(None)) -> torch.Tensor:
        """Returns what these rows get when they are computed by themselves."""
        shape, entries = self.shape, {}
        if shape.ratio:
            chosen = None if self.chosen is None else self.chosen[part]
            entries = {"entry_pages": self.entry_pages, "entry_tables": self.entry_tables, "chosen": chosen}
        return compressed_attention(
            self.q[part], self.window_pages, self.window_tables, self.rows.part(part), self.sinks,
            scale=SCALE, window_tokens=shape.window_tokens, ratio=shape.ratio, backend=backend, **entries,
        )  # fmt: skip

    def read_by(self, token: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The positions and the entries that a row reads, from the definition."""
        count, device = int(self.rows.num_keys[token]), self.q.device
        seen = count // self.shape.ratio if self.shape.ratio else 0
        entries = torch.arange(seen, device=device) if self.chosen is None else self.chosen[token, :seen].long()
        return torch.arange(max(count - self.shape.window_tokens, 0), count, device=device), entries

    def keys_of(self, token: int) -> torch.Tensor:
        """What pages hold of these, in fp64."""
        positions, entries = self.read_by(token)
        sequence = int(self.rows.sequences[token])
        keys = positions_in_pages(self.window_pages, self.window_tables[sequence], positions)
        if self.shape.ratio:
            found = positions_in_pages(self.entry_pages, self.entry_tables[sequence], entries)
            keys = torch.cat((keys, found))
        return keys.double()

    def truth(self, tokens: Sequence[int]) -> torch.Tensor:
        """fp64 attention of these rows, zeros of padding."""
        outs = torch.zeros(len(tokens), *self.q.shape[1:], dtype=torch.float64, device=self.q.device)
        for at, token in enumerate(tokens):
            if self.rows.num_keys[token]:
                keys = self.keys_of(token)
                scores = self.q[token].double() @ keys.T * SCALE
                weights = torch.cat((scores, self.sinks.double().unsqueeze(1)), dim=1).softmax(dim=1)
                outs[at] = weights[:, :-1] @ keys
        return outs


def make_compressed(
    lengths: Sequence[tuple[int, int]], shape: CompressedShape, *, num_decode: int = 0, seed: int = 0, order: int = 0
) -> CompressedCase:
    """Sequences of `cached` and then `new` tokens, of which the first num_decode have one new token each; `seed` draws
    what a sequence holds, by its place, and `order` which pages hold it."""
    totals, new_tokens = [cached + new for cached, new in lengths], [new for _, new in lengths]
    assert new_tokens[:num_decode] == [1] * num_decode
    firsts = [max(cached + 1 - shape.window_tokens, 0) for cached, _ in lengths]
    windows = _paged(list(zip(firsts, totals, strict=True)), shape, shape.page_tokens, seed, order)
    ratio = shape.ratio or shape.page_tokens
    entries = _paged([(0, total // ratio) for total in totals], shape, shape.page_tokens // ratio, seed + 1, order + 1)
    decode = torch.tensor(totals[:num_decode], dtype=torch.int32, device=shape.device)
    cu_q, cu_k = (running_sums(values[num_decode:], shape.device) for values in (new_tokens, totals))
    num_rows = sum(new_tokens) + 1
    rows = key_rows(decode, cu_q, cu_k, num_rows)
    rng = torch.Generator(shape.device).manual_seed(seed)
    q = torch.randn(num_rows, shape.heads, shape.dim, generator=rng, device=shape.device).to(shape.dtype)
    sinks = torch.randn(shape.heads, generator=rng, device=shape.device)
    chosen = None
    if shape.k:
        logits = torch.randn(num_rows, max(max(totals) // ratio, 1), generator=rng, device=shape.device)
        backend = Backend.REFERENCE if shape.device == "cpu" else Backend.AUTO
        chosen = top_k(logits, rows.entries(ratio).num_keys, shape.k, backend=backend)
    return CompressedCase(shape, rows, q, sinks, *windows, *entries, chosen)


def _paged(
    runs: list[tuple[int, int]], shape: CompressedShape, of_page: int, seed: int, order: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages and tables that hold places `first` to `end` of each sequence."""
    counts, device = [-(-end // of_page) for _, end in runs], shape.device
    shuffled = (torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(order)) + 1).int().to(device)
    pages = torch.full((sum(counts) + 3, of_page, shape.dim), POISON, dtype=shape.dtype, device=device)
    tables, taken = torch.zeros(len(runs), max(counts) + 1, dtype=torch.int32, device=device), 0
    for sequence, ((first, end), count) in enumerate(zip(runs, counts, strict=True)):
        tables[sequence, :count] = shuffled[taken : taken + count]
        taken += count
        rng = torch.Generator(device).manual_seed(1000 * seed + sequence)
        places, rows = (
            torch.arange(first, end, device=device),
            torch.randn(end, shape.dim, generator=rng, device=device),
        )
        pages[tables[sequence].long()[places // of_page], places % of_page] = rows[first:].to(shape.dtype)
    return pages, tables
