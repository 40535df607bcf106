"""prefill_attention in plain torch: one sequence after the other, in fp32.

Knows nothing of batches: a sequence's result depends on that sequence alone.
"""

import torch

from kernels.attention import QUERY_BLOCK, AttentionSpec, attend, visible_start
from kernels.errors import KernelArgumentError
from kernels.layout import read_span


def prefill_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    spec: AttentionSpec,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Fills out, and lse where one is wanted."""
    q_bounds, k_bounds = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for seq in range(len(q_bounds) - 1):
        start, new = q_bounds[seq], q_bounds[seq + 1] - q_bounds[seq]
        cached = k_bounds[seq + 1] - k_bounds[seq] - new
        if not 0 <= new <= max_seqlen_q or cached < 0:
            raise KernelArgumentError(
                f"sequence {seq}: {new} queries (max_seqlen_q {max_seqlen_q}) and {cached + new} keys"
            )
        for done in range(0, new, QUERY_BLOCK):
            rows = slice(start + done, start + min(new, done + QUERY_BLOCK))
            first, last = cached + done, cached + done + rows.stop - rows.start
            low = visible_start(first, spec.window)
            keys, values = read_span(k_pages, v_pages, block_tables[seq], low, last, spec.layout)
            row_lse = None if lse is None else lse[:, rows]
            out[rows] = attend(q[rows], keys, values, first, low, spec.scale, spec.window, sinks, row_lse)
