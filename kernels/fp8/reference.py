"""Rows into pages and out of them in plain torch, through scales where there are any.

Slots and page ids are given.
"""

import torch

from kernels.fp8 import ScaleKind, Scales, dequantise, quantise, token_scales
from kernels.layout import KvLayout, page_shape, write_slots


def write_rows(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slots: torch.Tensor,
    scales: Scales | None,
    layout: KvLayout,
) -> None:
    """Puts k and v [n, heads, dim] into n slots, quantized where the pages are fp8."""
    if scales is not None:
        page_tokens = page_shape(k_pages, layout).page_tokens
        k = _quantized(k, scales.k, scales.kind, slots, page_tokens)
        v = _quantized(v, scales.v, scales.kind, slots, page_tokens)
    write_slots(k, v, k_pages, v_pages, slots, layout)


def widened(
    quantized: torch.Tensor, scales: torch.Tensor, kind: ScaleKind, table: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Dequantized rows of one sequence [length, heads, dim] from position 0 on; `table` is its row of block tables."""
    if kind is ScaleKind.PER_TOKEN:
        page_tokens = scales.shape[2]
        pages = scales.index_select(0, table[: -(-quantized.shape[0] // page_tokens)])
        scales = pages.transpose(1, 2).flatten(0, 1)[: quantized.shape[0]].unsqueeze(-1)
    return dequantise(quantized, scales, dtype)


def _quantized(
    rows: torch.Tensor, scales: torch.Tensor, kind: ScaleKind, slots: torch.Tensor, page_tokens: int
) -> torch.Tensor:
    if kind is ScaleKind.PER_TENSOR:
        return quantise(rows, scales)
    own = token_scales(rows)
    scales[slots // page_tokens, :, slots % page_tokens] = own
    return quantise(rows, own.unsqueeze(-1))
