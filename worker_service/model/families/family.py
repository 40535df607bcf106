"""What a family of models states: how its config reads, and under which names its tensors lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from worker_service.model.fields import Fields
from worker_service.model.layer_weights import LayerWeights
from worker_service.model.spec import LayerSpec, ModelSpec
from worker_service.model.tensors import TensorSource

# Of the spec's layer at a prefix such as `model.layers.3`.
TakeLayer = Callable[[TensorSource, str, ModelSpec, LayerSpec], LayerWeights]


class Family(NamedTuple):
    """`read_spec` gets the merged fields. `take_layer` takes one layer's tensors.

    roots      what the names of the decoder's tensors may begin with; `model.` stands for each of them
    ignored    beginnings of names that a folder may hold and the decoder has no use for
    """

    architectures: tuple[str, ...]
    read_spec: Callable[[Fields], ModelSpec]
    take_layer: TakeLayer
    roots: tuple[str, ...] = ("model.",)
    ignored: tuple[str, ...] = ()
