"""The order of mla_prefill's work, made on the device from the lengths that lie there.

Tiles of queries with the most keys come first, so that the last programs to finish have short ones.
"""

import torch

from kernels._checks import check_lengths
from kernels.errors import KernelArgumentError

__all__ = ["BLOCK", "MlaPrefillPlan"]

BLOCK = 128
MAX_SEQS = 1024


class MlaPrefillPlan:
    """Static buffers for one batch shape: prepared once per step, read by every layer and by a captured graph."""

    def __init__(self, max_seqs: int, max_tokens: int, *, device: torch.device | str = "cuda") -> None:
        if not 0 <= max_seqs <= MAX_SEQS:
            raise KernelArgumentError(f"max_seqs: must be in 0..{MAX_SEQS}, got {max_seqs}")
        self.max_seqs, self.max_tokens = max_seqs, max_tokens
        self.max_tiles = max_tokens // BLOCK + max_seqs
        self.order = torch.zeros((max(self.max_tiles, 1), 2), dtype=torch.int32, device=device)
        # Tiles, the items taken and the programs done; a launch finds the last two at zero and leaves them so.
        self.counts = torch.zeros(3, dtype=torch.int32, device=device)

    def prepare(
        self,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        q_offsets: torch.Tensor | None = None,
        *,
        causal: bool = True,
    ) -> None:
        """Fills the plan for these lengths; the same tensors go to the attention."""
        num_seqs = cu_seqlens_q.shape[0] - 1
        if num_seqs > self.max_seqs:
            raise KernelArgumentError(f"cu_seqlens_q: the plan holds {self.max_seqs} sequences, got {num_seqs}")
        check_lengths("cu_seqlens_q", cu_seqlens_q, num_seqs + 1, self.order.device)
        check_lengths("cu_seqlens_k", cu_seqlens_k, num_seqs + 1, self.order.device)
        from kernels.mla_prefill.plan_triton import launch

        launch(self.order, self.counts, cu_seqlens_q, cu_seqlens_k, q_offsets, causal, self.max_tiles, BLOCK)
