"""The model's names of stored tensors: a multimodal folder has the decoder under another root, and more than it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from worker_service.core.errors import ModelError
from worker_service.model.decoder import HEAD, ROOT
from worker_service.model.families import family_of
from worker_service.model.spec import ModelSpec


class TensorNames(NamedTuple):
    """What of a folder is the model's.

    roots      beginnings of stored names that stand for `model.`; the longest that fits counts
    ignored    beginnings of names, as the model calls them, that are of no use
    renamed    the model's names of single tensors that are stored under others
    """

    roots: tuple[str, ...] = (ROOT,)
    ignored: tuple[str, ...] = ()
    renamed: Mapping[str, str] = MappingProxyType({})

    def by_model_name(self, stored: Iterable[str]) -> dict[str, str]:
        """Returns each used tensor's stored name by the model's name. Raises ModelError where two are the same."""
        names: dict[str, str] = {}
        for name in stored:
            ours = self._model_name(name)
            if ours.startswith(self.ignored):
                continue
            if ours in names:
                raise ModelError(name, f"is in the weights beside {names[ours]}, and both are the model's {ours}")
            names[ours] = name
        return names

    def _model_name(self, stored: str) -> str:
        """A name under no root is the model's own."""
        if stored in self.renamed:
            return self.renamed[stored]
        root = max((root for root in self.roots if stored.startswith(root)), key=len, default=None)
        if root is not None and stored not in self._heads():
            return ROOT + stored.removeprefix(root)
        return HEAD if stored in self._heads() else stored

    def _heads(self) -> list[str]:
        """The head lies beside a root `x.model.`, as `x.lm_head.weight`."""
        return [f"{root.removesuffix(ROOT)}{HEAD}" for root in self.roots if f".{root}".endswith(f".{ROOT}")]


def tensor_names(spec: ModelSpec) -> TensorNames:
    """Returns those of the spec's family."""
    family = family_of(spec.architecture)
    behind = range(len(spec.layers), len(spec.layers) + spec.num_mtp_layers)
    ignored = (*family.ignored, *(f"{ROOT}layers.{layer}." for layer in behind))
    return TensorNames(family.roots, ignored, family.renamed)
