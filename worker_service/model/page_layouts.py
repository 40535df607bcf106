"""Which layers of a model share a group of pages, and what a page of each group holds."""

from __future__ import annotations

from typing import NamedTuple

import torch

from session.words import GroupKind
from worker_service.gpu.group_layout import GroupLayout, PageTensor
from worker_service.model.spec import AttentionSpec, ModelSpec


class _KvShape(NamedTuple):
    """Layers with equal ones share a group; full attention comes first, then the shorter windows."""

    window_tokens: int
    num_kv_heads: int
    head_dim: int


def page_layouts(spec: ModelSpec, dtype: torch.dtype, page_tokens: int) -> tuple[GroupLayout, ...]:
    shapes = [_kv_shape(layer.mixer) for layer in spec.layers]
    distinct = sorted(set(shapes))
    return tuple(
        GroupLayout(
            name=_name(shape, distinct),
            kind=GroupKind.WINDOW if shape.window_tokens else GroupKind.FULL,
            layers=tuple(layer for layer, other in enumerate(shapes) if other == shape),
            tensors=(PageTensor(2, (page_tokens, shape.num_kv_heads, shape.head_dim), dtype),),
            window_tokens=shape.window_tokens,
        )
        for shape in distinct
    )


def _kv_shape(mixer: AttentionSpec) -> _KvShape:
    return _KvShape(mixer.window_tokens, mixer.num_kv_heads, mixer.head_dim)


def _name(shape: _KvShape, distinct: list[_KvShape]) -> str:
    name = f"window{shape.window_tokens}" if shape.window_tokens else "full"
    if sum(other.window_tokens == shape.window_tokens for other in distinct) == 1:
        return name
    return f"{name}-{shape.num_kv_heads}x{shape.head_dim}"
