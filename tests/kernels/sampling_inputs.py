"""Rows of logits with every sampling parameter on in some of them, and counts of some."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.sample_tokens import SamplingTensors, TokenCounts


class SampledCase(NamedTuple):
    logits: torch.Tensor
    params: SamplingTensors
    counts: TokenCounts

    def rows(self, *at: int) -> SampledCase:
        """These rows alone; the counts are copied."""
        index = torch.tensor(at, dtype=torch.long, device=self.logits.device)
        counts = self.counts._replace(counts=self.counts.counts.clone(), rows=self.counts.rows[index])
        return SampledCase(self.logits[index], SamplingTensors(*(values[index] for values in self.params)), counts)

    def replaced(self, **fields: float) -> SampledCase:
        """The same value in every row."""
        full = {name: torch.full_like(getattr(self.params, name), value) for name, value in fields.items()}
        return self._replace(params=self.params._replace(**full))


def sampled_case(
    num_rows: int, vocab_size: int, seed: int = 0, device: str = "cpu", dtype: torch.dtype = torch.bfloat16
) -> SampledCase:
    """bf16 logits have many ties."""
    generator = torch.Generator().manual_seed(seed)

    def ints(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, (num_rows,), generator=generator)

    def uniform() -> torch.Tensor:
        return torch.rand(num_rows, generator=generator)

    def sometimes(values: torch.Tensor, off: float) -> torch.Tensor:
        return torch.where(uniform() < 0.5, values, torch.full_like(values, off))

    params = SamplingTensors(
        temperature=torch.where(uniform() < 0.2, 0.0, uniform() * 2 + 0.1),
        top_k=sometimes(ints(1, vocab_size + 3), 0).int(),
        top_p=sometimes(uniform(), 1.0),
        min_p=sometimes(uniform() * 0.3, 0.0),
        repetition=sometimes(uniform() + 0.8, 1.0),
        presence=sometimes(uniform() * 2 - 1, 0.0),
        frequency=sometimes(uniform() * 2 - 1, 0.0),
        key_low=ints(0, 1 << 32),
        key_high=ints(0, 1 << 32),
        slots=sometimes(torch.randperm(num_rows, generator=generator), -1).int(),
    )
    positions = ints(0, 50).int()
    counts = torch.zeros(num_rows, vocab_size + 1, dtype=torch.int32)
    counts[:, :-1] = torch.randint(0, 5, (num_rows, vocab_size), generator=generator)
    counts[:, :-1] *= torch.rand(num_rows, vocab_size, generator=generator) < 0.3
    rows = torch.randperm(num_rows, generator=generator).int()
    # Half of the newest tokens are counted already.
    with_slot = params.slots >= 0
    slots = params.slots[with_slot].long()
    is_counted = (uniform() < 0.5).int()
    counts[slots, -1] = (positions[rows.long()] + is_counted)[with_slot]
    logits = (torch.randn(num_rows, vocab_size, generator=generator) * 3).to(dtype)
    held = TokenCounts(counts, ints(0, vocab_size).int(), positions, rows)
    return SampledCase(
        logits.to(device),
        SamplingTensors(*(values.to(device) for values in params)),
        TokenCounts(*(values.to(device) for values in held)),
    )
