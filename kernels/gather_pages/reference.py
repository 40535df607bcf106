"""gather_pages and scatter_pages in plain torch: one sequence after the other.

A sequence is a row of the block table and a length.
"""

from itertools import pairwise

import torch

from kernels.errors import KernelArgumentError
from kernels.fp8 import Scales
from kernels.fp8.reference import widened, write_rows
from kernels.layout import KvLayout, page_shape, read_span


def gather_pages(
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor],
    scales: Scales | None,
    layout: KvLayout,
) -> None:
    """Fills the dense keys and values."""
    bounds = _bounds(cu_seqlens_k, out[0].shape[0])
    for seq, (start, stop) in enumerate(pairwise(bounds)):
        keys, values = read_span(k_pages, v_pages, block_tables[seq], 0, stop - start, layout)
        if scales is not None:
            keys = widened(keys, scales.k, scales.kind, block_tables[seq], out[0].dtype)
            values = widened(values, scales.v, scales.kind, block_tables[seq], out[1].dtype)
        out[0][start:stop] = keys
        out[1][start:stop] = values


def scatter_pages(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    scales: Scales | None,
    layout: KvLayout,
) -> None:
    """Writes the dense keys and values back to the slots that gather reads."""
    page_tokens = page_shape(k_pages, layout).page_tokens
    bounds = _bounds(cu_seqlens_k, k.shape[0])
    for seq, (start, stop) in enumerate(pairwise(bounds)):
        position = torch.arange(stop - start, device=k.device)
        slots = block_tables[seq].long()[position // page_tokens] * page_tokens + position % page_tokens
        write_rows(k[start:stop], v[start:stop], k_pages, v_pages, slots, scales, layout)


def _bounds(cu_seqlens_k: torch.Tensor, total_tokens: int) -> list[int]:
    bounds: list[int] = cu_seqlens_k.tolist()
    if bounds[-1] != total_tokens:
        raise KernelArgumentError(f"total_tokens: cu_seqlens_k ends at {bounds[-1]}, got {total_tokens}")
    return bounds
