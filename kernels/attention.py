"""What the two attention ops share: their argument checks, and what both references hold."""

import math
from collections.abc import Callable
from typing import NamedTuple, TypedDict

import torch

from kernels._checks import (
    KV_DTYPES,
    check_contiguous,
    check_dense,
    check_disjoint,
    check_page_pair,
    check_pages,
    check_rows,
    check_tensor,
)
from kernels.backend import Backend
from kernels.errors import KernelArgumentError
from kernels.fp8 import E4M3, ScaleKind, Scales, check_scales, dequantised_by_table
from kernels.layout import KvLayout, PageShape, read_span

# A weight below e^-64 of the largest counts as e^-64 in the references: no fp32 sum can tell, and values too small for
# fp32's normal range slow a CPU's exponential and the product after it down by a factor of 50 to 200.
LEAST_EXPONENT = -64.0

SINK_DTYPES = (torch.float32, torch.bfloat16)

TRITON_HEAD_DIMS = (16, 32, 64, 80, 96, 112, 128, 192, 256)
TRITON_MAX_PAGE_TOKENS = 256
TRITON_MAX_GROUP = 16


class AttentionSpec(NamedTuple):
    """The checked arguments that are not tensors."""

    shape: PageShape
    layout: KvLayout
    q_heads: int
    scale: float
    window: int
    softcap: float = 0.0
    scales: Scales | None = None

    @property
    def group(self) -> int:
        """Query heads that share a kv head."""
        return self.q_heads // self.shape.heads

    @property
    def row_elements(self) -> int:
        """The width of the matrix that a pool is to the copy engine: a slot's heads (NHD), or one of them (HND)."""
        return self.shape.dim * (self.shape.heads if self.layout is KvLayout.NHD else 1)


class PagedArguments(NamedTuple):
    """What an attention over pages is called with, unchecked; q is [num_tokens, q_heads, dim] or packed."""

    q: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    layout: KvLayout = KvLayout.NHD
    scale: float | None = None
    k_scales: torch.Tensor | None = None
    v_scales: torch.Tensor | None = None
    window: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None


class AttentionOptions(TypedDict, total=False):
    """Keyword arguments that both attentions over pages take; the ops' docstrings say what they mean."""

    scale: float | None
    window: int
    softcap: float
    sinks: torch.Tensor | None
    layout: KvLayout
    k_scales: torch.Tensor | None
    v_scales: torch.Tensor | None
    out: torch.Tensor | None
    backend: Backend


def check_attention(given: PagedArguments, *, packed: bool = False) -> AttentionSpec:
    """Refuses what no attention op can work with; a packed q is [kv_heads, num_tokens, group, dim]."""
    q, k_pages, v_pages = given.q, given.k_pages, given.v_pages
    shape = check_pages(k_pages, v_pages, given.layout)
    check_page_pair(k_pages, v_pages)
    dtypes = KV_DTYPES if k_pages.dtype is E4M3 else (k_pages.dtype,)
    axes = (shape.heads, None, None, shape.dim) if packed else (None, None, shape.dim)
    check_tensor("q", q, axes, dtypes, k_pages.device)
    check_rows("q", q)
    if packed:
        check_contiguous("q", q)
    scales = check_scales(given.k_scales, given.v_scales, k_pages, q.dtype, shape)
    heads = query_shape(q)[1]
    if heads == 0 or shape.heads == 0 or heads % shape.heads:
        raise KernelArgumentError(f"q: {heads} heads are not a multiple of the pages' {shape.heads} heads")
    scale = shape.dim**-0.5 if given.scale is None else float(given.scale)
    _check_softmax(scale, given.window, given.softcap, given.sinks, heads, k_pages.device)
    return AttentionSpec(shape, given.layout, heads, scale, given.window, float(given.softcap), scales)


def _check_softmax(
    scale: float, window: int, softcap: float, sinks: torch.Tensor | None, heads: int, device: torch.device
) -> None:
    if window < 0:
        raise KernelArgumentError(f"window: must be 0 (unlimited) or positive, got {window}")
    if not math.isfinite(scale):
        raise KernelArgumentError(f"scale: must be finite, got {scale}")
    if not (math.isfinite(softcap) and softcap >= 0.0):
        raise KernelArgumentError(f"softcap: must be 0 (none) or positive and finite, got {softcap}")
    if sinks is not None:
        check_dense("sinks", sinks, (heads,), SINK_DTYPES, device)


def query_shape(q: torch.Tensor) -> tuple[int, int, int]:
    """(num_tokens, q_heads, dim) of queries, packed or not."""
    if q.dim() == 4:
        return q.shape[1], q.shape[0] * q.shape[2], q.shape[3]
    return q.shape[0], q.shape[1], q.shape[2]


def check_triton_attention(q: torch.Tensor, spec: AttentionSpec) -> None:
    """Refuses what the references can do and the Triton kernels cannot."""
    shape, group = spec.shape, spec.q_heads // spec.shape.heads
    if shape.dim not in TRITON_HEAD_DIMS:
        raise KernelArgumentError(f"dim: must be one of {TRITON_HEAD_DIMS}, got {shape.dim}")
    if shape.page_tokens > TRITON_MAX_PAGE_TOKENS or shape.page_tokens & (shape.page_tokens - 1):
        raise KernelArgumentError(
            f"page_tokens: must be a power of two up to {TRITON_MAX_PAGE_TOKENS}, got {shape.page_tokens}"
        )
    if group > TRITON_MAX_GROUP:
        raise KernelArgumentError(f"q: at most {TRITON_MAX_GROUP} query heads share a kv head, got {group}")
    check_tensor_core_dtype(q)


def check_tensor_core_dtype(q: torch.Tensor) -> None:
    """Refuses on CUDA what tensor cores do not multiply."""
    if q.is_cuda and q.dtype not in KV_DTYPES[:2]:
        raise KernelArgumentError(f"q: dtype must be one of {[str(d) for d in KV_DTYPES[:2]]} on CUDA, got {q.dtype}")


def output_for(q: torch.Tensor, out: torch.Tensor | None, *inputs: torch.Tensor | None) -> torch.Tensor:
    """The tensor to write to: the caller's, checked, or a new one. Rows of no sequence keep what they held, or zero."""
    if out is None:
        return torch.zeros(query_shape(q), dtype=q.dtype, device=q.device)
    check_tensor("out", out, query_shape(q), (q.dtype,), q.device)
    check_rows("out", out)
    for name, source in zip(("q", "k_pages", "v_pages", "sinks"), (q, *inputs), strict=True):
        if source is not None:
            check_disjoint("out", out, name, source)
    return out


def with_lse(
    attend: Callable[..., torch.Tensor], q: torch.Tensor, *arguments: object, **options: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what an attention op returns for these arguments, and its log-sum-exp, fp32 [q_heads, num_tokens]."""
    tokens, heads, _ = query_shape(q)
    lse = torch.empty((heads, tokens), dtype=torch.float32, device=q.device)
    return attend(q, *arguments, **options, lse=lse), lse


def check_lse(lse: torch.Tensor | None, q: torch.Tensor) -> None:
    """Refuses a log-sum-exp output that is not contiguous fp32 [q_heads, num_tokens]."""
    if lse is not None:
        tokens, heads, _ = query_shape(q)
        check_dense("lse", lse, (heads, tokens), (torch.float32,), q.device)


def float_span(
    k_pages: torch.Tensor, v_pages: torch.Tensor, table: torch.Tensor, start: int, stop: int, spec: AttentionSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [stop - start, kv_heads, dim] of one sequence in fp32, times their scales if any."""
    keys, values = (part.float() for part in read_span(k_pages, v_pages, table, start, stop, spec.layout))
    if spec.scales is None:
        return keys, values
    k_scales, v_scales, kind = spec.scales
    if kind is ScaleKind.PER_TENSOR:
        return keys * k_scales, values * v_scales
    position = torch.arange(start, stop, device=table.device)
    page, slot = table[position // spec.shape.page_tokens].long(), position % spec.shape.page_tokens
    return keys * k_scales[page, :, slot].unsqueeze(-1), values * v_scales[page, :, slot].unsqueeze(-1)


def scaled_span(
    k_pages: torch.Tensor, v_pages: torch.Tensor, table: torch.Tensor, start: int, stop: int, spec: AttentionSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same on a CPU, where fp8 keys and values have one scale; others keep their dtype."""
    keys, values = read_span(k_pages, v_pages, table, start, stop, spec.layout)
    if spec.scales is None:
        return keys, values
    return dequantised_by_table(keys, spec.scales.k), dequantised_by_table(values, spec.scales.v)


def visible_start(position: int, window: int) -> int:
    """The first key that the query at this absolute position sees."""
    return max(0, position - window + 1) if window else 0
