"""A model folder's files of weights: one safetensors file, or the shards that an index names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from worker_service.core.errors import ModelError
from worker_service.model.fields import read_json

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


class Header(NamedTuple):
    """What a file says of a tensor; the dtype as safetensors spells it."""

    shape: tuple[int, ...]
    dtype: str


class WeightFiles:
    """The stored tensors by name. A file is mapped into memory from the first question about it to its last tensor."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file_of = _files_by_tensor(folder)
        self._opened: dict[str, Any] = {}
        self._num_unread: Counter[str] = Counter()

    def names(self) -> list[str]:
        return list(self._file_of)

    def header(self, name: str) -> Header:
        try:
            part = self._file(name).get_slice(name)
        except SafetensorError:
            raise ModelError(name, f"is not in {self._file_of[name]}, though the index says so") from None
        return Header(tuple(part.get_shape()), part.get_dtype())

    def expect(self, names: Iterable[str]) -> None:
        """Takes the names of the tensors that will be read, each once."""
        self._num_unread = Counter(self._file_of[name] for name in names)

    def read(self, name: str) -> torch.Tensor:
        """Returns the tensor as the file has it, on the CPU."""
        stored: torch.Tensor = self._file(name).get_tensor(name)
        file = self._file_of[name]
        self._num_unread[file] -= 1
        if not self._num_unread[file]:
            del self._opened[file]
        return stored

    def _file(self, name: str) -> Any:
        file = self._file_of[name]
        if file not in self._opened:
            self._opened[file] = _opened(self._folder / file)
        return self._opened[file]


def weight_files(folder: Path) -> list[str]:
    """Returns the names of the files that hold the folder's tensors, sorted."""
    return sorted(set(_files_by_tensor(folder).values()))


def _files_by_tensor(folder: Path) -> dict[str, str]:
    if (folder / INDEX).is_file():
        return _indexed_files(folder)
    if not (folder / WEIGHTS).is_file():
        raise ModelError(WEIGHTS, f"neither it nor {INDEX} is in the model folder")
    with _opened(folder / WEIGHTS) as weights:
        return dict.fromkeys(weights.keys(), WEIGHTS)


def _indexed_files(folder: Path) -> dict[str, str]:
    index = read_index(folder)
    for file in index.values():
        if not (folder / file).is_file():
            raise ModelError(file, "is named by the index, but is not in the model folder")
    return index


def read_index(folder: Path) -> dict[str, str]:
    """Returns each tensor's file, by the folder's index of shards."""
    index = read_json(folder / INDEX).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise ModelError(INDEX, "weight_map must be an object that names each tensor's file")
    for name, file in index.items():
        # A file beside the index, never a path that leads out of the folder.
        if not isinstance(file, str) or Path(file).name != file:
            raise ModelError(INDEX, f"weight_map[{name!r}] must be a file name, not {file!r}")
    return index


def _opened(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelError(path.name, f"is not a safetensors file ({error})") from error
