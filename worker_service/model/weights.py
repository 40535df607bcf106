"""A model folder's weights: checked against the config, and read tensor by tensor as the decoder takes them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path

import torch

from kernels.grouped_linear import Fp8Experts
from worker_service.core.errors import ModelError
from worker_service.model.checkpoint_files import WeightFiles
from worker_service.model.decoder import HEAD, expected_tensors
from worker_service.model.layer_weights import ExpertWeight
from worker_service.model.spec import ModelSpec
from worker_service.model.tensor_names import TensorNames, tensor_names
from worker_service.model.tensors import Expected
from worker_service.model.weight_copies import WeightCopies
from worker_service.model.weight_formats import FP8, MXFP4, ExpertFormat, Part, Shape, WeightFormat

Wanted = Mapping[str, Expected]
# Values and scales, or a matrix alone.
Tensors = tuple[torch.Tensor, ...]
# Called with the bytes that are loaded, and all bytes.
Progress = Callable[[int, int], None]

# A family's files may have several names for it, of which none is there.
MISSING = "is missing from the weights (the name is the worker's; files may have another one for it)"
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
        parts = [part for name, expected in wanted.items() for part in self.parts(name, expected.shape)]
        for part in parts:
            if part.name not in self._stored_name:
                raise ModelError(part.name, MISSING)
        used = {part.name for part in parts}
        for name, stored in self._stored_name.items():
            if name not in used and not _is_derived(name, tied_embeddings):
                raise ModelError(stored, "is in the weights, but the config has no place for it")
        self._files.expect(self._stored_name[name] for name in used)
        return sum(self._checked_bytes(part) for part in parts)

    def read(self, name: str, shape: Shape) -> list[torch.Tensor]:
        """Returns the stored tensors that make this one, for the format's `decoded`. Raises ModelError."""
        tensors = []
        for part in self.parts(name, shape):
            stored = self._stored_name[part.name]
            tensor = self._files.read(stored)
            part.check(tensor, stored)
            tensors.append(tensor)
        return tensors

    def parts(self, name: str, shape: Shape) -> tuple[Part, ...]:
        """Returns the stored tensors that make the one of this name, by the model's names."""
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
    """A checkpoint as a TensorSource: each tensor is read when it is taken, so none is held twice.

    `kept_formats`: operands of `grouped_linear` that experts may stay, as they are stored. `made_bytes` counts what was
    returned, and `kept_bytes` how much of that are such experts, by their format's name.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        total_bytes: int,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress,
        *,
        kept_formats: Collection[ExpertFormat] = (),
    ) -> None:
        self._checkpoint = checkpoint
        self._format = checkpoint.format
        self._total_bytes = total_bytes
        self._loaded_bytes = 0
        self._dtype = dtype
        self._kept_formats = kept_formats
        self._copies = WeightCopies(device)
        self._progress = progress
        self.made_bytes = 0
        self.kept_bytes: Counter[str] = Counter()

    def take(self, name: str, *shape: int, wide: bool = False) -> torch.Tensor:
        tensor = self._format.decoded(self._read(name, shape), torch.float32 if wide else self._dtype)
        self.made_bytes += tensor.nbytes
        return tensor

    def take_experts(self, names: Sequence[Sequence[str]], rows: int, columns: int) -> ExpertWeight:
        made = self._expert_format(chain.from_iterable(names), (rows, columns), len(names[0]))
        if made is None:
            return filled_stacks(names, lambda name: (self.take(name, rows, columns),))[0]
        return self._kept(made, filled_stacks(names, lambda name: self._operand(name, (rows, columns))))

    def take_transposed_experts(self, name: str, num_experts: int, rows: int, columns: int) -> ExpertWeight:
        shape = (num_experts, columns, rows)
        made = self._expert_format([name], shape, 1)
        if made is None:
            return self.take(name, *shape).transpose(1, 2).contiguous()
        return self._kept(made, self._operand(name, shape))

    def stored_alike(self, names: Sequence[str], rows: int, columns: int) -> bool:
        return len(self._expert_formats(names, (rows, columns), 1)) == 1

    def holds(self, name: str) -> bool:
        return name in self._checkpoint.names

    def _read(self, name: str, shape: Shape) -> list[torch.Tensor]:
        """Returns the parts of a tensor on the device."""
        stored = self._checkpoint.read(name, shape)
        self._loaded_bytes += sum(part.nbytes for part in stored)
        parts = [self._copies.copied(part) for part in stored]
        self._progress(self._loaded_bytes, self._total_bytes)
        return parts

    def _operand(self, name: str, shape: Shape) -> Tensors:
        return self._format.expert_operand(self._read(name, shape))

    def _kept(self, made: ExpertFormat, parts: Tensors) -> ExpertWeight:
        values, scales = parts
        self.made_bytes += values.nbytes + scales.nbytes
        self.kept_bytes[FP8 if made is Fp8Experts else MXFP4] += values.nbytes + scales.nbytes
        return made(values, scales)

    def _expert_format(self, names: Iterable[str], shape: Shape, num_joined: int) -> ExpertFormat | None:
        """Returns as what these experts stay; None where one of them must be decoded."""
        formats = self._expert_formats(names, shape, num_joined)
        made = formats.pop()
        return made if not formats and made in self._kept_formats else None

    def _expert_formats(self, names: Iterable[str], shape: Shape, num_joined: int) -> set[ExpertFormat | None]:
        return {self._format.expert_format(self._checkpoint.parts(name, shape), num_joined) for name in names}


def filled_stacks(names: Sequence[Sequence[str]], take: Callable[[str], Tensors]) -> Tensors:
    """Returns [len(names), len(names[0]) * rows, columns] of each kind of matrix [rows, columns] that `take` returns
    for a name; only one name's matrices are in memory beside them."""
    count = len(names) * len(names[0])
    stacks: Tensors = ()
    for place, name in enumerate(chain.from_iterable(names)):
        stacks = _with_matrices(stacks, take(name), place, count)
    return tuple(stack.view(len(names), -1, stack.shape[-1]) for stack in stacks)


def _with_matrices(stacks: Tensors, matrices: Tensors, place: int, count: int) -> Tensors:
    """Returns the stacks, made for `count` of such matrices if there are none yet, with these ones in their place."""
    stacks = stacks or tuple(matrix.new_empty(count, *matrix.shape) for matrix in matrices)
    for stack, matrix in zip(stacks, matrices, strict=True):
        stack[place].copy_(matrix)
    return stacks


def open_weights(
    folder: Path,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress = lambda loaded_bytes, total_bytes: None,
    *,
    kept_formats: Collection[ExpertFormat] = (),
) -> CheckpointTensors:
    """Returns the folder's tensors, checked, to be taken by a Decoder. Raises ModelError."""
    checkpoint = Checkpoint(folder, tensor_names(spec), spec.weight_format)
    total_bytes = checkpoint.check(expected_tensors(spec, checkpoint.names), spec.tied_embeddings)
    return CheckpointTensors(checkpoint, total_bytes, dtype, device, progress, kept_formats=kept_formats)


def _is_derived(name: str, tied_embeddings: bool) -> bool:
    """Older checkpoints store the rotary frequencies, some tied ones the head a second time."""
    return name.endswith("rotary_emb.inv_freq") or (tied_embeddings and name == HEAD)
