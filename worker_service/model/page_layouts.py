"""Which layers of a model share a group of pages, and what a page of each group holds."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.fp8 import E4M3
from session.words import GroupKind
from worker_service.core.errors import ModelError
from worker_service.gpu.group_layout import GroupLayout, PageTensor
from worker_service.model.spec import LatentSpec, MixerSpec, ModelSpec


class _Row(NamedTuple):
    """What a token has in a layer: layers with equal rows share a group, full attention first, then shorter windows."""

    window_tokens: int
    planes: int
    shape: tuple[int, ...]


def page_layouts(spec: ModelSpec, kv_dtype: torch.dtype, page_tokens: int) -> tuple[GroupLayout, ...]:
    if kv_dtype is E4M3 and any(isinstance(layer.mixer, LatentSpec) for layer in spec.layers):
        raise ModelError("kv_dtype", f"fp8_e4m3 is for keys and values of heads; {spec.architecture} keeps latents")
    rows = [_row(layer.mixer) for layer in spec.layers]
    distinct = sorted(set(rows))
    return tuple(
        GroupLayout(
            name=_name(row, distinct),
            kind=GroupKind.WINDOW if row.window_tokens else GroupKind.FULL,
            layers=tuple(layer for layer, other in enumerate(rows) if other == row),
            tensors=(PageTensor(row.planes, (page_tokens, *row.shape), kv_dtype),),
            window_tokens=row.window_tokens,
        )
        for row in distinct
    )


def _row(mixer: MixerSpec) -> _Row:
    """Keys and values of each head, or one latent."""
    if isinstance(mixer, LatentSpec):
        return _Row(0, 1, (mixer.width,))
    return _Row(mixer.window_tokens, 2, (mixer.num_kv_heads, mixer.head_dim))


def _name(row: _Row, distinct: list[_Row]) -> str:
    name = f"window{row.window_tokens}" if row.window_tokens else "full"
    if sum(other.window_tokens == row.window_tokens for other in distinct) == 1:
        return name
    return f"{name}-{'x'.join(map(str, row.shape))}"
