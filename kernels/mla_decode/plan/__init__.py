"""Who does what in mla_decode, decided on the device from the lengths that lie there.

Knows neither queries nor latents. What it decides changes speed only: the sums are the same whoever computes them.
"""

import torch

from kernels._checks import check_lengths
from kernels.errors import KernelArgumentError

__all__ = ["LEAF", "ROWS", "MlaDecodePlan"]

ROWS = 64
LEAF = 1024
MAX_SEQS = 1024


class MlaDecodePlan:
    """Static buffers for one batch shape: prepared once per step, read by every layer and by a captured graph.

    A sequence's rows (query tokens times heads) are cut into tiles of 64; a tile is attended by one program, or leaf by
    leaf of its keys by several, whose partial results a second launch folds.
    """

    def __init__(
        self,
        max_seqs: int,
        max_seqlen_k: int,
        heads: int,
        *,
        max_q_tokens: int = 1,
        programs: int | None = None,
        device: torch.device | str = "cuda",
    ) -> None:
        if not 0 <= max_seqs <= MAX_SEQS:
            raise KernelArgumentError(f"max_seqs: must be in 0..{MAX_SEQS}, got {max_seqs}")
        self.max_seqs, self.max_seqlen_k, self.heads, self.max_q_tokens = max_seqs, max_seqlen_k, heads, max_q_tokens
        if programs is None:
            programs = torch.cuda.get_device_properties(device).multi_processor_count
        self.programs = programs
        self.slot_rows = min(ROWS, heads * max_q_tokens)
        tiles = -(-heads * max_q_tokens // ROWS)
        leaves = max(-(-max_seqlen_k // LEAF), 1)
        self.max_items = max(max_seqs * tiles * leaves, 1)
        # A sequence is shared out only if it is longer than a program's part of the batch: see the kernel's limit.
        slots = max(min(max_seqs * tiles, programs) * leaves, 1)

        def buffer(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.items = buffer(self.max_items, 5, dtype=torch.int32)
        self.counts = buffer(1, dtype=torch.int32)
        self.bases = buffer(max(max_seqs, 1), dtype=torch.int32)
        self.acc = torch.empty((slots, self.slot_rows, 512), dtype=torch.float32, device=device)
        self.peak = torch.empty((slots, self.slot_rows), dtype=torch.float32, device=device)
        self.total = torch.empty((slots, self.slot_rows), dtype=torch.float32, device=device)
        self.sums = torch.empty((programs, ROWS, 512), dtype=torch.float32, device=device)

    def check(self, num_seqs: int, max_seqlen_k: int, heads: int, max_q_tokens: int) -> None:
        """Refuses a batch that the buffers do not hold."""
        held = (self.max_seqs, self.max_seqlen_k, self.max_q_tokens)
        if any(has < needs for has, needs in zip(held, (num_seqs, max_seqlen_k, max_q_tokens), strict=True)):
            raise KernelArgumentError(
                f"plan: holds {held} sequences, latents and queries, got {(num_seqs, max_seqlen_k, max_q_tokens)}"
            )
        if heads != self.heads:
            raise KernelArgumentError(f"plan: made for {self.heads} heads, got {heads}")

    def prepare(self, seqlens_k: torch.Tensor, cu_seqlens_q: torch.Tensor | None = None) -> None:
        """Fills the plan for these lengths; the same tensors go to the attention."""
        num_seqs = seqlens_k.shape[0]
        if num_seqs > self.max_seqs:
            raise KernelArgumentError(f"seqlens_k: the plan holds {self.max_seqs} sequences, got {num_seqs}")
        check_lengths("seqlens_k", seqlens_k, num_seqs, self.items.device)
        from kernels.mla_decode.plan.kernel import launch

        launch(self, seqlens_k, cu_seqlens_q)
