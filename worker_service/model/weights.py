"""A model folder's weights: checked against the config, and read tensor by tensor as the decoder takes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path

import torch

from worker_service.core.errors import ModelError
from worker_service.model.checkpoint_files import WeightFiles
from worker_service.model.decoder import HEAD, expected_tensors
from worker_service.model.spec import ModelSpec
from worker_service.model.tensor_names import TensorNames, tensor_names
from worker_service.model.tensors import Expected
from worker_service.model.weight_copies import WeightCopies
from worker_service.model.weight_formats import Part, Shape, WeightFormat

Wanted = Mapping[str, Expected]
# Called with the bytes that are loaded, and all bytes.
Progress = Callable[[int, int], None]

ONE_BYTE = ("F8_E4M3", "F8_E8M0", "U8", "I8")
DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, **dict.fromkeys(ONE_BYTE, 1)}


class Checkpoint:
    """The tensors of a folder, by the model's names, whatever its files call them and however they store them."""

    def __init__(self, folder: Path, names: TensorNames, weight_format: WeightFormat) -> None:
        self.format = weight_format
        self._files = WeightFiles(folder)
        self._stored_name = names.by_model_name(self._files.names())

    @property
    def names(self) -> Container[str]:
        """The model's names of all that is stored."""
        return self._stored_name.keys()

    def check(self, wanted: Wanted, tied_embeddings: bool) -> int:
        """Returns the bytes that these tensors take in the files.

        Raises ModelError unless each is there, has the expected shape and a dtype of the format, and every stored
        tensor is used.
        """
        parts = [part for name, expected in wanted.items() for part in self._parts(name, expected.shape)]
        for part in parts:
            if part.name not in self._stored_name:
                raise ModelError(part.name, "is missing from the weights")
        used = {part.name for part in parts}
        for name, stored in self._stored_name.items():
            if name not in used and not _is_derived(name, tied_embeddings):
                raise ModelError(stored, "is in the weights, but the config has no place for it")
        self._files.expect(self._stored_name[name] for name in used)
        return sum(self._checked_bytes(part) for part in parts)

    def read(self, name: str, shape: Shape) -> list[torch.Tensor]:
        """Returns the stored tensors that make this one, for the format's `decoded`. Raises ModelError."""
        tensors = []
        for part in self._parts(name, shape):
            stored = self._stored_name[part.name]
            tensor = self._files.read(stored)
            part.check(tensor, stored)
            tensors.append(tensor)
        return tensors

    def _parts(self, name: str, shape: Shape) -> tuple[Part, ...]:
        return self.format.parts(name, shape, self._stored_name)

    def _checked_bytes(self, part: Part) -> int:
        stored = self._stored_name[part.name]
        header = self._files.header(stored)
        if header.shape != part.shape:
            raise ModelError(stored, f"has shape {list(header.shape)}, but the config wants {list(part.shape)}")
        if header.dtype not in part.dtypes:
            raise ModelError(stored, f"has dtype {header.dtype}, but the config wants {' or '.join(part.dtypes)}")
        return math.prod(header.shape) * DTYPE_BYTES[header.dtype]


class CheckpointTensors:
    """A checkpoint as a TensorSource: each tensor is read when it is taken, so none is held twice."""

    def __init__(
        self, checkpoint: Checkpoint, total_bytes: int, dtype: torch.dtype, device: torch.device, progress: Progress
    ) -> None:
        self._checkpoint = checkpoint
        self._total_bytes = total_bytes
        self._loaded_bytes = 0
        self._dtype = dtype
        self._device = device
        self._copies = WeightCopies(device)
        self._progress = progress

    def take(self, name: str, *shape: int, wide: bool = False) -> torch.Tensor:
        stored = self._checkpoint.read(name, shape)
        parts = [self._copies.copied(part) for part in stored]
        tensor = self._checkpoint.format.decoded(parts, torch.float32 if wide else self._dtype)
        self._loaded_bytes += sum(part.nbytes for part in stored)
        self._progress(self._loaded_bytes, self._total_bytes)
        return tensor

    def take_stack(self, names: Sequence[str], *shape: int) -> torch.Tensor:
        stack = torch.empty(len(names), *shape, dtype=self._dtype, device=self._device)
        for place, name in zip(stack, names, strict=True):
            place.copy_(self.take(name, *shape))
        return stack

    def holds(self, name: str) -> bool:
        return name in self._checkpoint.names


def open_weights(
    folder: Path,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress = lambda loaded_bytes, total_bytes: None,
) -> CheckpointTensors:
    """Returns the folder's tensors, checked, to be taken by a Decoder. Raises ModelError."""
    checkpoint = Checkpoint(folder, tensor_names(spec), spec.weight_format)
    total_bytes = checkpoint.check(expected_tensors(spec, checkpoint.names), spec.tied_embeddings)
    return CheckpointTensors(checkpoint, total_bytes, dtype, device, progress)


def _is_derived(name: str, tied_embeddings: bool) -> bool:
    """Older checkpoints store the rotary frequencies, some tied ones the head a second time."""
    return name.endswith("rotary_emb.inv_freq") or (tied_embeddings and name == HEAD)
