"""fp8 e4m3 keys and values: quantized values times scales; argument checks and plain torch.

`triton` holds the same arithmetic as jit functions: one fp32 division rounded to nearest, one conversion rounded to
nearest even, so both give the same quantized values.

    per tensor       scales fp32 [1], read: the caller measured them; what lies beyond 448 * scale saturates
    per token        scales fp32 [num_pages, heads, page_tokens], written with the values: a row's largest value is 448
"""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import torch

from kernels._checks import KV_DTYPES, check_dense_pages, check_disjoint, check_page_pair, check_rows, check_tensor
from kernels.errors import KernelArgumentError
from kernels.layout import PageShape

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
# The smallest normal fp32: a row of zeros still has a scale to divide by.
LEAST_SCALE = 2.0**-126


class ScaleKind(Enum):
    """What one scale belongs to; kernels know the kinds by these numbers."""

    PER_TENSOR = 1
    PER_TOKEN = 2


class Scales(NamedTuple):
    """Checked scales of key pages and value pages."""

    k: torch.Tensor
    v: torch.Tensor
    kind: ScaleKind


def dense_dtypes(pages: torch.Tensor) -> tuple[torch.dtype, ...]:
    """What may be moved into these pages or out of them: their own dtype, and for fp8 every wider one."""
    return (E4M3, *KV_DTYPES) if pages.dtype is E4M3 else (pages.dtype,)


def check_written_rows(
    k: torch.Tensor, v: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, shape: Sequence[int | None]
) -> None:
    """Refuses keys and values that are not [num_tokens, heads, dim] of one dtype that these pages take."""
    for name, rows in (("k", k), ("v", v)):
        check_tensor(name, rows, shape, dense_dtypes(k_pages), k_pages.device)
        check_rows(name, rows)
        check_disjoint("k_pages", k_pages, name, rows)
        check_disjoint("v_pages", v_pages, name, rows)
    if v.dtype is not k.dtype:
        raise KernelArgumentError(f"v: dtype must be k's {k.dtype}, got {v.dtype}")


def check_scaled_rows(
    pages: torch.Tensor, scales: torch.Tensor | None, dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Refuses pages that are not [num_pages, page_tokens, dim] in `dtype`, or in fp8 with a scale for each token."""
    check_tensor("pages", pages, (None, None, dim), (dtype, E4M3), device)
    check_dense_pages("pages", pages)
    if (scales is None) == (pages.dtype is E4M3):
        raise KernelArgumentError(f"scales: fp8 pages need them and others take none; pages are {pages.dtype}")
    if scales is not None:
        check_tensor("scales", scales, tuple(pages.shape[:2]), (torch.float32,), device)
        check_dense_pages("scales", scales)


def check_scales(
    k_scales: torch.Tensor | None,
    v_scales: torch.Tensor | None,
    k_pages: torch.Tensor,
    dense: torch.dtype,
    shape: PageShape,
) -> Scales | None:
    """Refuses scales that do not fit; None when fp8 values move as they are, which needs no scales and takes none."""
    if dense is k_pages.dtype:
        for name, scales in (("k_scales", k_scales), ("v_scales", v_scales)):
            if scales is not None:
                raise KernelArgumentError(f"{name}: nothing to scale between {dense} and {k_pages.dtype} pages")
        return None
    if k_scales is None or v_scales is None:
        name = "k_scales" if k_scales is None else "v_scales"
        raise KernelArgumentError(f"{name}: {dense} and {k_pages.dtype} pages need scales, got None")
    kind = ScaleKind.PER_TENSOR if k_scales.dim() == 1 else ScaleKind.PER_TOKEN
    wanted = (1,) if kind is ScaleKind.PER_TENSOR else (shape.num_pages, shape.heads, shape.page_tokens)
    for name, scales in (("k_scales", k_scales), ("v_scales", v_scales)):
        check_tensor(name, scales, wanted, (torch.float32,), k_pages.device)
        check_dense_pages(name, scales)
    return Scales(k_scales, v_scales, kind)


def check_written_scales(scales: Scales | None, k: torch.Tensor, v: torch.Tensor) -> None:
    """Refuses scales that would be written over each other or over the rows that are being read."""
    if scales is None or scales.kind is ScaleKind.PER_TENSOR:
        return
    check_page_pair(scales.k, scales.v, "k_scales", "v_scales")
    for name, written in (("k_scales", scales.k), ("v_scales", scales.v)):
        check_disjoint(name, written, "k", k)
        check_disjoint(name, written, "v", v)


def token_scales(rows: torch.Tensor) -> torch.Tensor:
    """The scale of each of rows [n, heads, dim], fp32 [n, heads]; values must be finite."""
    amax = rows.float().abs().amax(dim=-1)
    # By a tensor: on a CUDA device a quotient by a number is a product with its reciprocal, rounded twice.
    return (amax / torch.full_like(amax, E4M3_MAX)).clamp_min(LEAST_SCALE)


def quantise(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Returns quantized rows; `scales` broadcasts."""
    return saturate(rows.float() / scales)


def saturate(rows: torch.Tensor) -> torch.Tensor:
    """Returns the e4m3 values next to fp32 ones. The bare conversion need not saturate; NaN stays NaN."""
    return rows.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


def dequantise(quantized: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns dequantized values, rounded once to dtype; `scales` broadcasts."""
    return (quantized.float() * scales).to(dtype)


def dequantised_by_table(quantized: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Returns what `dequantise` does for one scale [1], in fp32 on a CPU: by looking 256 products up.

    On one AVX-512 core torch's conversion takes 2.5 ms for 385,000 elements, this 0.4.
    """
    products = torch.arange(256, dtype=torch.uint8).view(E4M3).float() * scale
    return products.index_select(0, quantized.view(torch.uint8).flatten().int()).view(quantized.shape)
