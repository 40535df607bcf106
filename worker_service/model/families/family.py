"""What a family of models defines: how its config is read, and the names of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from session.words import GroupKind
from worker_service.model.fields import Fields
from worker_service.model.layer_weights import LayerWeights
from worker_service.model.spec import PAGE_TOKENS, STATE_PAGE_TOKENS, LayerSpec, ModelSpec
from worker_service.model.tensors import TensorSource
from worker_service.model.weight_formats import FP8, PLAIN

# Of the spec's layer at a prefix such as `model.layers.3`.
TakeLayer = Callable[[TensorSource, str, ModelSpec, LayerSpec], LayerWeights]

FULL_AND_WINDOW = (GroupKind.FULL, GroupKind.WINDOW)
FULL_AND_STATE = (GroupKind.FULL, GroupKind.STATE)


class Family(NamedTuple):
    """`read_spec` gets the merged fields. `take_layer` takes one layer's tensors.

    defaults         fields that a file may leave out, with the values that transformers gives them; null is a value
    roots            what the names of the decoder's tensors may begin with; `model.` stands for each of them
    ignored          beginnings of names that a folder may hold and the decoder has no use for, as they are behind
                     `model.`
    kinds            those of the groups that its layers may need
    embeddings       name of the embeddings, and of the norm behind the last layer, as they are behind `model.`
    final_norm
    page_tokens      token slots of a page, unless a setting has another number
    weight_formats   names of the formats in which its checkpoints may be stored
    renamed          the model's names of single tensors that are stored under others
    """

    architectures: tuple[str, ...]
    read_spec: Callable[[Fields], ModelSpec]
    take_layer: TakeLayer
    defaults: Fields = MappingProxyType({})
    roots: tuple[str, ...] = ("model.",)
    ignored: tuple[str, ...] = ()
    kinds: tuple[GroupKind, ...] = (GroupKind.FULL,)
    embeddings: str = "embed_tokens"
    final_norm: str = "norm"
    page_tokens: int = PAGE_TOKENS
    weight_formats: tuple[str, ...] = (PLAIN, FP8)
    renamed: Mapping[str, str] = MappingProxyType({})


def recurrent_family(
    architecture: str, read_spec: Callable[[Fields], ModelSpec], take_layer: TakeLayer, defaults: Fields, **more: Any
) -> Family:
    """Returns a family with recurrent layers, whose checkpoints are stored plain."""
    state = {"kinds": FULL_AND_STATE, "page_tokens": STATE_PAGE_TOKENS, "weight_formats": (PLAIN,)}
    return Family((architecture,), read_spec, take_layer, defaults, **{**state, **more})
