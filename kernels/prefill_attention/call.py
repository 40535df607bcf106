"""The checked arguments of one prefill_attention call."""

from typing import NamedTuple

import torch

from kernels.attention import AttentionSpec

__all__ = ["PrefillCall"]


class PrefillCall(NamedTuple):
    """Queries, pages and the sequences' lengths on the device, with an upper bound of the queries on the host."""

    q: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    block_tables: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    sinks: torch.Tensor | None
    spec: AttentionSpec
    segment_tokens: int = 0

    @property
    def num_seqs(self) -> int:
        return self.cu_seqlens_q.shape[0] - 1
