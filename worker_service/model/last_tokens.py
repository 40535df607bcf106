"""The tokens that the last launch sampled, on the device: the launch after it reads them there, not from the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class LastTokens:
    """`values` int32 [size], in the order of the last launch's sampled rows. Captured graphs read and write it."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.values = torch.zeros(size, dtype=torch.int32, device=device)

    def first(self, num_sampled: int) -> torch.Tensor | None:
        """Returns where to write the tokens of the present launch; None when it samples more than `size`."""
        return self.values[:num_sampled] if num_sampled <= self.values.shape[0] else None

    def put_from_host(self, token_ids: Sequence[int]) -> None:
        known = token_ids[: self.values.shape[0]]
        self.values[: len(known)].copy_(torch.tensor(known, dtype=torch.int32))

    def fill_in(self, token_ids: torch.Tensor, from_previous: torch.Tensor) -> None:
        """Writes the last tokens into the leading entries of token_ids whose from_previous is not negative."""
        target = token_ids[: from_previous.shape[0]]
        last = self.values.index_select(0, from_previous.clamp(min=0))
        torch.where(from_previous >= 0, last, target, out=target)
