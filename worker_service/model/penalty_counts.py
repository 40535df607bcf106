"""How often each token occurs in the sequences with penalties, on the device."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq

import torch

from kernels.sample_tokens import TokenCounts
from worker_service.core.batch import CountedRow, SampledRow
from worker_service.model.staging import Upload


class PenaltyCounts:
    """A row of counts for each slot: 4 bytes for each token of the vocabulary, 33 MB for 64 slots of 128,256 tokens.

    Allocated at the start, since captured launches keep its address; on a CPU a slot takes memory once it is used.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._counts = torch.zeros((num_slots, vocab_size + 1), dtype=torch.int32, device=device)
        self._upload = Upload(device)

    def of(self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> TokenCounts:
        return TokenCounts(self._counts, token_ids, positions, rows)

    def recount(self, sampled: Seq[SampledRow]) -> None:
        """Counts all tokens of the rows that say so. A launch itself counts one token a row, on the device."""
        for row in sampled:
            if row.counted is not None and row.counted.tokens is not None:
                self._recount(row.counted, row.counted.tokens)

    def _recount(self, row: CountedRow, tokens: array[int]) -> None:
        counts = self._counts[row.slot]
        ids = self._upload.send([tokens])[0].long()
        prompt, answer = ids[: row.prompt_len], ids[row.prompt_len :]
        counts.zero_()
        counts.index_fill_(0, prompt, 1)
        counts.scatter_add_(0, answer, torch.full_like(answer, 2, dtype=torch.int32))
        counts[-1:].fill_(len(tokens))
