"""gather_pages and scatter_pages in plain torch: one sequence after the other.

A sequence is a row of the block table and a length.
"""

from itertools import pairwise

import torch

from kernels.errors import KernelArgumentError
from kernels.fp8.reference import widened, write_rows
from kernels.gather_pages.call import MoveCall
from kernels.layout import read_span


def gather_pages(call: MoveCall) -> None:
    """Fills the dense keys and values."""
    k, v, scales, tables = call.k, call.v, call.scales, call.block_tables
    bounds = _bounds(call.cu_seqlens_k, k.shape[0])
    for seq, (start, stop) in enumerate(pairwise(bounds)):
        keys, values = read_span(call.k_pages, call.v_pages, tables[seq], 0, stop - start, call.layout)
        if scales is not None:
            keys = widened(keys, scales.k, scales.kind, tables[seq], k.dtype)
            values = widened(values, scales.v, scales.kind, tables[seq], v.dtype)
        k[start:stop] = keys
        v[start:stop] = values


def scatter_pages(call: MoveCall) -> None:
    """Writes the dense keys and values back to the slots that gather reads."""
    k, v, page_tokens = call.k, call.v, call.shape.page_tokens
    bounds = _bounds(call.cu_seqlens_k, k.shape[0])
    for seq, (start, stop) in enumerate(pairwise(bounds)):
        position = torch.arange(stop - start, device=k.device)
        slots = call.block_tables[seq].long()[position // page_tokens] * page_tokens + position % page_tokens
        write_rows(k[start:stop], v[start:stop], call.k_pages, call.v_pages, slots, call.scales, call.layout)


def _bounds(cu_seqlens_k: torch.Tensor, total_tokens: int) -> list[int]:
    bounds: list[int] = cu_seqlens_k.tolist()
    if bounds[-1] != total_tokens:
        raise KernelArgumentError(f"total_tokens: cu_seqlens_k ends at {bounds[-1]}, got {total_tokens}")
    return bounds
