"""What a launch's layers read of its batch, on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from worker_service.model.state_inputs import StateInputs


class PromptLens(NamedTuple):
    new_tokens: tuple[int, ...]
    cached_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LaunchInputs:
    """A batch on the device, padding rows last; the integers are the host's knowledge or bounds.

    Lengths are split at the last decode row, as two kernels share the launch. `prompt_lens` are the new and the cached
    tokens of each prompt, where the host knows them: not in a captured launch. There max_prompt_keys bounds the keys of
    all prompts, of each one where keys are chosen, if it matters. `states` is None for a model without.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: Sequence[torch.Tensor]
    block_tables: Sequence[torch.Tensor]
    decode_seqlens_k: torch.Tensor
    prefill_cu_q: torch.Tensor
    prefill_cu_k: torch.Tensor
    num_decode: int
    max_seqlen_q: int
    max_seqlen_k: int
    prompt_lens: PromptLens | None = None
    max_prompt_keys: int = 0
    states: StateInputs | None = None

    @property
    def num_prefill(self) -> int:
        """Sequences with a chunk of their prompt in this launch."""
        return self.prefill_cu_q.shape[0] - 1
