"""A model folder's weights: found, checked against the config, and loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from worker_service.core.errors import ModelError
from worker_service.model.decoder import HEAD, expected_tensors
from worker_service.model.fields import read_json
from worker_service.model.spec import ModelSpec
from worker_service.model.tensors import Expected

Wanted = Mapping[str, Expected]
# Called with the bytes that are loaded, and all bytes.
Progress = Callable[[int, int], None]

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


class Checkpoint:
    """The tensors of a folder, by name, over one safetensors file or the shards that an index names."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file_of = _files_by_tensor(folder)

    def check(self, wanted: Wanted, tied_embeddings: bool) -> None:
        """Raises ModelError unless every tensor is there, has the expected shape, and is used by the model."""
        for name in wanted:
            if name not in self._file_of:
                raise ModelError(name, "is missing from the weights")
        for name in self._file_of:
            if name not in wanted and not _is_derived(name, tied_embeddings):
                raise ModelError(name, "is in the weights, but the config has no place for it")
        for name, tensor_shape in self._tensor_shapes(wanted):
            if tensor_shape != wanted[name].shape:
                raise ModelError(
                    name, f"has shape {list(tensor_shape)}, but the config wants {list(wanted[name].shape)}"
                )

    def load(
        self, wanted: Wanted, dtype: torch.dtype, device: torch.device, progress: Progress
    ) -> dict[str, torch.Tensor]:
        total_bytes = sum((self._folder / file).stat().st_size for file in set(self._file_of.values()))
        loaded_bytes = 0
        tensors: dict[str, torch.Tensor] = {}
        for file, names in self._by_file(wanted):
            with _opened(self._folder / file) as weights:
                for name in names:
                    stored = weights.get_tensor(name)
                    tensors[name] = stored.to(device=device, dtype=torch.float32 if wanted[name].wide else dtype)
                    loaded_bytes += stored.nbytes
                    progress(loaded_bytes, total_bytes)
        return tensors

    def _tensor_shapes(self, wanted: Wanted) -> Iterator[tuple[str, tuple[int, ...]]]:
        for file, names in self._by_file(wanted):
            with _opened(self._folder / file) as weights:
                stored = set(weights.keys())
                for name in names:
                    if name not in stored:
                        raise ModelError(name, f"is not in {file}, though the index says so")
                    yield name, tuple(weights.get_slice(name).get_shape())

    def _by_file(self, wanted: Wanted) -> Iterator[tuple[str, list[str]]]:
        for file in sorted(set(self._file_of.values())):
            yield file, [name for name in wanted if self._file_of[name] == file]


def load_weights(
    folder: Path,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress = lambda loaded_bytes, total_bytes: None,
) -> dict[str, torch.Tensor]:
    checkpoint = Checkpoint(folder)
    wanted = expected_tensors(spec)
    checkpoint.check(wanted, spec.tied_embeddings)
    return checkpoint.load(wanted, dtype, device, progress)


def weight_files(folder: Path) -> list[str]:
    """Names of the files that hold the folder's tensors, sorted."""
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
    """Each tensor's file, by the folder's index of shards."""
    index = read_json(folder / INDEX).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise ModelError(INDEX, "weight_map must be an object that names each tensor's file")
    for name, file in index.items():
        # A file beside the index, never a path that leads out of the folder.
        if not isinstance(file, str) or Path(file).name != file:
            raise ModelError(INDEX, f"weight_map[{name!r}] must be a file name, not {file!r}")
    return index


def _is_derived(name: str, tied_embeddings: bool) -> bool:
    """Older checkpoints store the rotary frequencies, some tied ones the head a second time."""
    return name.endswith("rotary_emb.inv_freq") or (tied_embeddings and name == HEAD)


def _opened(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelError(path.name, f"is not a safetensors file ({error})") from error
