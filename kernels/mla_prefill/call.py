"""The checked arguments of one mla_prefill call."""

from typing import NamedTuple

import torch

from kernels.mla_prefill.state import AttentionState

__all__ = ["MlaPrefillCall"]


class MlaPrefillCall(NamedTuple):
    """Queries, keys and values with their bounds, and the state that the call goes on from or leaves behind."""

    q: torch.Tensor
    k_nope: torch.Tensor
    k_rope: torch.Tensor
    v: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    q_offsets: torch.Tensor | None
    causal: bool
    scale: float
    state: AttentionState | None
    resumes: bool
    suspends: bool

    @property
    def dims(self) -> tuple[int, int, int]:
        """Elements of a key's own part and of its rotary one, and of a value."""
        nope = self.k_nope.shape[2]
        return nope, self.q.shape[2] - nope, self.v.shape[2]

    @property
    def num_seqs(self) -> int:
        return self.cu_seqlens_q.shape[0] - 1

    @property
    def mask_mode(self) -> int:
        """Position of query 0, as the kernels know it: 0 keys less queries, 1 given by offset, 2 behind every key."""
        if self.q_offsets is not None:
            return 1
        return 0 if self.causal else 2

    @property
    def offsets_or_any(self) -> torch.Tensor:
        """What a launch passes as offsets: a kernel that is told of none does not read them."""
        return self.cu_seqlens_q if self.q_offsets is None else self.q_offsets

    @property
    def rope_head_stride(self) -> int:
        """From one head's rotary key to the next; 0 where all heads share one."""
        return self.k_rope.stride(1) if self.k_rope.dim() == 3 else 0
