"""Rows into pages and out of them in plain torch, through scales where there are any.

Knows no sequence and no batch: slots and page ids are given.
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
    """Puts k and v [n, heads, dim] into n slots, as codes where the pages are narrower."""
    if scales is not None:
        page_tokens = page_shape(k_pages, layout).page_tokens
        k = _codes(k, scales.k, scales.kind, slots, page_tokens)
        v = _codes(v, scales.v, scales.kind, slots, page_tokens)
    write_slots(k, v, k_pages, v_pages, slots, layout)


def widened(
    codes: torch.Tensor, scales: torch.Tensor, kind: ScaleKind, table: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Numbers of one sequence's codes [length, heads, dim] from position 0 on; `table` is its row of block tables."""
    if kind is ScaleKind.PER_TOKEN:
        page_tokens = scales.shape[2]
        pages = scales.index_select(0, table[: -(-codes.shape[0] // page_tokens)])
        scales = pages.transpose(1, 2).flatten(0, 1)[: codes.shape[0]].unsqueeze(-1)
    return dequantise(codes, scales, dtype)


def _codes(
    rows: torch.Tensor, scales: torch.Tensor, kind: ScaleKind, slots: torch.Tensor, page_tokens: int
) -> torch.Tensor:
    if kind is ScaleKind.PER_TENSOR:
        return quantise(rows, scales)
    own = token_scales(rows)
    scales[slots // page_tokens, :, slots % page_tokens] = own
    return quantise(rows, own.unsqueeze(-1))
