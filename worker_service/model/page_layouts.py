"""Which layers of a model share a group of pages, and what a page of each group holds."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.fp8 import E4M3
from session.words import GroupKind
from worker_service.core.errors import ModelError
from worker_service.gpu.group_layout import GroupLayout, PageTensor
from worker_service.model.spec import LatentSpec, MixerSpec, ModelSpec, ShortConvSpec


class _Row(NamedTuple):
    """What a token has in a layer, or a sequence in a layer with a state. Layers with equal rows share a group: full
    attention first, then shorter windows, then states."""

    has_state: bool
    window_tokens: int
    planes: int
    shape: tuple[int, ...]

    @property
    def kind(self) -> GroupKind:
        if self.has_state:
            return GroupKind.STATE
        return GroupKind.WINDOW if self.window_tokens else GroupKind.FULL

    @property
    def name(self) -> str:
        return f"window{self.window_tokens}" if self.window_tokens else self.kind.name.lower()


def page_layouts(
    spec: ModelSpec, dtype: torch.dtype, page_tokens: int, kv_dtype: torch.dtype | None = None
) -> tuple[GroupLayout, ...]:
    """Returns the groups of the model's layers.

    Args:
        dtype: the model's, of all that pages hold but what `kv_dtype` is said of.
        kv_dtype: of keys and values; None is `dtype`. A state is never rounded to it.
    """
    if kv_dtype is E4M3 and any(isinstance(layer.mixer, LatentSpec) for layer in spec.layers):
        raise ModelError("kv_dtype", f"fp8_e4m3 is for keys and values of heads; {spec.architecture} keeps latents")
    rows = [_row(layer.mixer, spec.hidden_size) for layer in spec.layers]
    distinct = sorted(set(rows))

    def tensor(row: _Row) -> PageTensor:
        if row.has_state:
            return PageTensor(row.planes, row.shape, dtype)
        return PageTensor(row.planes, (page_tokens, *row.shape), kv_dtype or dtype)

    return tuple(
        GroupLayout(
            name=_name(row, distinct),
            kind=row.kind,
            layers=tuple(layer for layer, other in enumerate(rows) if other == row),
            tensors=(tensor(row),),
            window_tokens=row.window_tokens,
        )
        for row in distinct
    )


def _row(mixer: MixerSpec, hidden_size: int) -> _Row:
    """Keys and values of each head, one latent, or the columns that a convolution has seen last."""
    if isinstance(mixer, ShortConvSpec):
        return _Row(True, 0, 1, (mixer.width - 1, hidden_size))
    if isinstance(mixer, LatentSpec):
        return _Row(False, 0, 1, (mixer.width,))
    return _Row(False, mixer.window_tokens, 2, (mixer.num_kv_heads, mixer.head_dim))


def _name(row: _Row, distinct: list[_Row]) -> str:
    if sum(other.name == row.name for other in distinct) == 1:
        return row.name
    return f"{row.name}-{'x'.join(map(str, row.shape))}"
