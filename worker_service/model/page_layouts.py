"""Which layers of a model share a group of pages, and what a page of each group holds."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from kernels.block_scan import GRID_TOKENS
from kernels.fp8 import E4M3
from session.words import GroupKind
from worker_service.core.errors import ModelError
from worker_service.gpu.group_layout import GroupLayout, PageRole, PageTensor
from worker_service.model.attention_specs import AttentionSpec, CompressedSpec, LatentSpec
from worker_service.model.recurrent_specs import RecurrentSpec
from worker_service.model.spec import LoneMixerSpec, ModelSpec


class _Array(NamedTuple):
    """`planes` arrays of that shape. In a layer with pages a row is of one token, or of `ratio` tokens where there is a
    ratio; in a layer with a state the array is of the whole sequence."""

    planes: int
    shape: tuple[int, ...]
    wide: bool = False
    ratio: int = 1


class _Row(NamedTuple):
    """What a token has in a layer, or a sequence in a layer with a state. Layers with equal rows share a group: full
    attention first, then shorter windows, then states. `index_dim` are the elements of an indexer's key."""

    has_state: bool
    window_tokens: int
    arrays: tuple[_Array, ...]
    index_dim: int = 0
    role: str = PageRole.KEYS.value

    @property
    def kind(self) -> GroupKind:
        if self.has_state:
            return GroupKind.STATE
        return GroupKind.WINDOW if self.window_tokens else GroupKind.FULL

    @property
    def name(self) -> str:
        if self.role == PageRole.ENTRIES.value:
            return f"entries{self.arrays[0].ratio}"
        return f"window{self.window_tokens}" if self.window_tokens else self.kind.name.lower()


def page_layouts(
    spec: ModelSpec,
    dtype: torch.dtype,
    page_tokens: int,
    kv_dtype: torch.dtype | None = None,
    index_dtype: torch.dtype | None = None,
) -> tuple[GroupLayout, ...]:
    """Returns the groups of the model's layers.

    Args:
        dtype: the model's, of all that pages hold but what `kv_dtype` is said of.
        kv_dtype: of keys and values; None is `dtype`. A state is never rounded to it.
        index_dtype: of an indexer's keys; None is `dtype`, fp8 comes with a scale for each token.
    """
    _check_page_dtypes(spec, kv_dtype, index_dtype)
    mixers = [(number, mixer) for number, layer in enumerate(spec.layers) for mixer in layer.mixers]
    rows = [(number, row) for number, mixer in mixers for row in _rows(mixer, spec.hidden_size)]
    if page_tokens % GRID_TOKENS and any(array.wide for _, row in rows for array in row.arrays):
        # Only there can a state be left within a launch (ADR 22).
        raise ModelError("page_tokens", f"{page_tokens} is no multiple of {GRID_TOKENS}, as {spec.architecture} needs")
    ratio = math.lcm(*(array.ratio for _, row in rows for array in row.arrays))
    if page_tokens % ratio:
        # Entries lie in the page of their tokens.
        raise ModelError("page_tokens", f"{page_tokens} is no multiple of {ratio}, as {spec.architecture} needs")
    distinct = sorted({row for _, row in rows})

    def tensors(row: _Row) -> tuple[PageTensor, ...]:
        if row.has_state:
            return tuple(
                PageTensor(array.planes, array.shape, torch.float32 if array.wide else dtype) for array in row.arrays
            )
        arrays = (
            PageTensor(array.planes, (page_tokens // array.ratio, *array.shape), kv_dtype or dtype)
            for array in row.arrays
        )
        return (*arrays, *_index_tensors(row.index_dim, page_tokens, index_dtype or dtype))

    return tuple(
        GroupLayout(
            name=_name(row, distinct),
            kind=row.kind,
            layers=tuple(layer for layer, other in rows if other == row),
            tensors=tensors(row),
            window_tokens=row.window_tokens,
            role=PageRole(row.role),
        )
        for row in distinct
    )


def _check_page_dtypes(spec: ModelSpec, kv_dtype: torch.dtype | None, index_dtype: torch.dtype | None) -> None:
    """Raises ModelError where the model's pages hold nothing that could be of that dtype."""
    mixers = [mixer for layer in spec.layers for mixer in layer.mixers]
    has_latents = any(isinstance(mixer, LatentSpec) for mixer in mixers)
    has_entries = any(isinstance(mixer, CompressedSpec) for mixer in mixers)
    if kv_dtype is E4M3 and (has_latents or has_entries):
        kept = "latents" if has_latents else "entries that are key and value at once"
        raise ModelError("kv_dtype", f"fp8_e4m3 is for keys and values of heads; {spec.architecture} keeps {kept}")
    if index_dtype is not E4M3 or any(isinstance(mixer, LatentSpec) and mixer.index is not None for mixer in mixers):
        return
    why = "chooses entries, whose index keys are not supported in it" if has_entries else "has none"
    raise ModelError("index_key_dtype", f"fp8_e4m3 is for the keys of an indexer; {spec.architecture} {why}")


def _rows(mixer: LoneMixerSpec, hidden_size: int) -> tuple[_Row, ...]:
    """Returns what the mixer has in each of its groups."""
    if not isinstance(mixer, CompressedSpec):
        return (_row(mixer, hidden_size),)
    keys = _Row(False, mixer.window_tokens, (_Array(1, (mixer.head_dim,)),))
    made = mixer.compressor
    if made is None:
        return (keys,)
    dims = (mixer.head_dim,) if made.index is None else (mixer.head_dim, made.index.head_dim)
    entries = tuple(_Array(1, (dim,), ratio=made.ratio) for dim in dims)
    raw = tuple(_Array(1, (made.parts * dim,)) for dim in dims)
    return (
        keys,
        _Row(False, 0, entries, role=PageRole.ENTRIES.value),
        _Row(False, made.raw_tokens, raw, role=PageRole.RAW.value),
    )


def _row(mixer: LoneMixerSpec, hidden_size: int) -> _Row:
    """Keys and values of each head, one latent with its index key, or a state."""
    if isinstance(mixer, RecurrentSpec):
        return _Row(True, 0, tuple(_Array(1, *array) for array in mixer.state(hidden_size)))
    if isinstance(mixer, LatentSpec):
        index = mixer.index
        index_dim = 0 if index is None or index.is_shared else index.head_dim
        return _Row(False, 0, (_Array(1, (mixer.width,)),), index_dim)
    assert isinstance(mixer, AttentionSpec)
    return _Row(False, mixer.window_tokens, (_Array(2, (mixer.num_kv_heads, mixer.head_dim)),))


def _index_tensors(dim: int, page_tokens: int, dtype: torch.dtype) -> tuple[PageTensor, ...]:
    """An indexer's keys, and the scales of fp8 ones."""
    if dim == 0:
        return ()
    keys = PageTensor(1, (page_tokens, dim), dtype)
    return (keys, PageTensor(1, (page_tokens,), torch.float32)) if dtype is E4M3 else (keys,)


def _name(row: _Row, distinct: list[_Row]) -> str:
    if sum(other.name == row.name for other in distinct) == 1:
        return row.name
    shapes = ["x".join(map(str, array.shape)) for array in row.arrays]
    if row.index_dim:
        shapes.append(str(row.index_dim))
    return f"{row.name}-{'+'.join(shapes)}"
