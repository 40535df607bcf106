"""The checked arguments of one mla_decode call."""

from typing import NamedTuple

import torch

__all__ = ["MlaDecodeCall"]


class MlaDecodeCall(NamedTuple):
    """Queries, pages and the sequences' lengths on the device, with their upper bounds on the host."""

    q: torch.Tensor
    pages: torch.Tensor
    block_tables: torch.Tensor
    seqlens_k: torch.Tensor
    max_seqlen_k: int
    cu_seqlens_q: torch.Tensor | None
    max_q_tokens: int
    scale: float
    latent: int

    @property
    def num_seqs(self) -> int:
        return self.seqlens_k.shape[0]

    @property
    def spans_or_any(self) -> torch.Tensor:
        """What a launch passes as cu_seqlens_q: a kernel that is told of none does not read it."""
        return self.seqlens_k if self.cu_seqlens_q is None else self.cu_seqlens_q
