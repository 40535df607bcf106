"""decode_attention in plain torch: one sequence after the other, in fp32.

Knows nothing of batches: a sequence's result depends on that sequence alone.
"""

import torch

from kernels.attention import AttentionSpec, attend, visible_start
from kernels.errors import KernelArgumentError
from kernels.layout import read_span


def decode_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_tables: torch.Tensor,
    seqlens_k: torch.Tensor,
    max_seqlen_k: int,
    spec: AttentionSpec,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Fills out, and lse where one is wanted; a sequence without keys gives 0 and leaves its lse at minus infinity."""
    for seq, length in enumerate(seqlens_k.tolist()):
        if not 0 <= length <= max_seqlen_k:
            raise KernelArgumentError(f"seqlens_k: sequence {seq} has {length} keys, max_seqlen_k is {max_seqlen_k}")
        if length == 0:
            out[seq] = 0.0
            continue
        low = visible_start(length - 1, spec.window)
        keys, values = read_span(k_pages, v_pages, block_tables[seq], low, length, spec.layout)
        # The last position sees every key from `low` on, so there is nothing left to mask.
        row, row_lse = slice(seq, seq + 1), None if lse is None else lse[:, seq : seq + 1]
        out[row] = attend(q[row], keys, values, length - 1, low, spec.scale, 0, sinks, row_lse)
