"""Which implementation AUTO takes for an attention over pages."""

from collections.abc import Callable
from typing import Any

import torch

from kernels.attention import AttentionSpec, PagedArguments, check_attention
from kernels.backend import Backend, choose_backend
from kernels.decode_attention.hopper import reason_against as reason_against_decode
from kernels.layout import KvLayout
from kernels.prefill_attention.hopper import reason_against as reason_against_prefill

ReasonAgainst = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, AttentionSpec], str | None]


def decode_route(q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, **options: Any) -> Backend:
    return _route(reason_against_decode, q, k_pages, v_pages, **options)


def prefill_route(q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, **options: Any) -> Backend:
    return _route(reason_against_prefill, q, k_pages, v_pages, **options)


def _route(
    reason_against: ReasonAgainst,
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    *,
    layout: KvLayout = KvLayout.NHD,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
) -> Backend:
    given = PagedArguments(q, k_pages, v_pages, layout, k_scales=k_scales, v_scales=v_scales)
    spec = check_attention(given, packed=q.dim() == 4)
    return choose_backend(Backend.AUTO, q, lambda: reason_against(q, k_pages, v_pages, spec))
