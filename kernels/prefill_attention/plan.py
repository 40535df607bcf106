"""What the layers of one prefill step share: the order in which tiles of queries are computed.

Its buffers never move, so a captured graph that holds `prepare` replays with new lengths.
"""

import torch

from kernels.backend import is_hopper
from kernels.errors import KernelArgumentError
from kernels.prefill_attention.few_scratch import FewRows
from kernels.prefill_attention.hopper import TILE_ROWS, key_block
from kernels.prefill_attention.hopper.few import shares
from kernels.prefill_attention.segments import check_segment_tokens, segment_keys
from kernels.prefill_attention.units import Units

__all__ = ["COUNTERS", "RECORD", "PrefillPlan"]

# int32 fields of one record: 32 bytes.
RECORD = 8
# int32 counters: tiles listed, tiles drawn, programs done; the last two are 0 between launches.
COUNTERS = 3


class PrefillPlan:
    """The work list of a step of at most max_seqs sequences and max_tokens queries; empty where nothing needs one.

    With segment_tokens it also holds the units into which few tiles behind many keys are cut, without it what programs
    hand on that share the keys of few rows (17 MiB for dim 128).

    The programs of a launch draw from its counters and leave them at zero: one launch at a time may use a plan.
    """

    def __init__(
        self,
        max_seqs: int,
        max_tokens: int,
        q_heads: int,
        kv_heads: int,
        dim: int,
        *,
        device: torch.device | str,
        segment_tokens: int = 0,
    ) -> None:
        if min(max_seqs, max_tokens, q_heads, kv_heads, dim) < 1 or q_heads % kv_heads:
            raise KernelArgumentError(
                f"PrefillPlan: sizes must be positive and q_heads a multiple of kv_heads, got max_seqs {max_seqs}, "
                f"max_tokens {max_tokens}, q_heads {q_heads}, kv_heads {kv_heads}, dim {dim}"
            )
        check_segment_tokens(segment_tokens)
        self.max_seqs, self.max_tokens, self.segment_tokens = max_seqs, max_tokens, segment_tokens
        self.heads = (q_heads, kv_heads, dim)
        self.device = torch.device(device)
        self._tile_queries = max(TILE_ROWS // (q_heads // kv_heads), 1)
        max_tiles = max_tokens // self._tile_queries + max_seqs if is_hopper(self.device) else 0
        self.records = torch.empty(max_tiles, RECORD, dtype=torch.int32, device=self.device)
        self.count = torch.zeros(COUNTERS, dtype=torch.int32, device=self.device)
        self.few: FewRows | None = None
        if shares(q_heads // kv_heads, dim) and not segment_tokens and is_hopper(self.device):
            self.few = FewRows(dim, self._tile_queries // 2, self.device)
        self.units: Units | None = None
        if segment_keys(segment_tokens, dim, window=0) and is_hopper(self.device):
            self.units = Units(kv_heads, dim, self._tile_queries, segment_tokens, self.device)

    def prepare(self, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor) -> None:
        """Lists the tiles of these lengths, int32 [num_seqs + 1] each; on the device, without waiting for it."""
        num_seqs = cu_seqlens_q.shape[0] - 1
        if num_seqs > self.max_seqs:
            raise KernelArgumentError(f"cu_seqlens_q: {num_seqs} sequences, the plan holds {self.max_seqs}")
        if is_hopper(self.device):
            from kernels.prefill_attention.plan_triton import launch

            key_tile = key_block(self.heads[2])
            launch(cu_seqlens_q, cu_seqlens_k, self.records, self.count, self._tile_queries, key_tile)
        if self.few is not None:
            self.few.measure(self.records, self.count)
        if self.units is not None:
            self.units.list(self.records, self.count)

    def check(
        self, num_seqs: int, num_tokens: int, heads: tuple[int, int, int], device: torch.device, segment_tokens: int = 0
    ) -> None:
        """Refuses a batch that this plan was not made for."""
        if num_seqs > self.max_seqs or num_tokens > self.max_tokens:
            raise KernelArgumentError(
                f"plan: holds {self.max_seqs} sequences and {self.max_tokens} tokens, got {num_seqs} and {num_tokens}"
            )
        if heads != self.heads:
            raise KernelArgumentError(f"plan: made for (q_heads, kv_heads, dim) {self.heads}, got {heads}")
        if segment_tokens != self.segment_tokens:
            raise KernelArgumentError(f"plan: made for segment_tokens {self.segment_tokens}, got {segment_tokens}")
        if device != self.count.device:
            raise KernelArgumentError(f"plan: must be on {device}, is on {self.count.device}")
