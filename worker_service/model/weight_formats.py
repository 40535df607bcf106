"""How a checkpoint stores its weights: plain, fp8 with a scale for each block, mxfp4, or fp8 beside experts in mxfp4.

The model computes in its own dtype. A format says which stored tensors make one of the model's, and makes it from them,
one tensor at a time. Experts may stay as they are stored: a format says as which operand of `grouped_linear`. Which
tensors of a quantised checkpoint are stored plain (norms, embeddings, routers) is told by the names in its files.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from kernels.grouped_linear import Fp8Experts, Mxfp4Experts, dequantised
from kernels.grouped_linear.stored import FP8_BLOCK, MX_BLOCK, fp8_values, mxfp4_values, powers_of_two
from worker_service.core.errors import ModelError
from worker_service.model.fields import Fields

Shape = tuple[int, ...]

CONFIG = "quantization_config"
# As safetensors spells them.
FLOATS = ("F64", "F32", "F16", "BF16")
WHOLES = ("I64", "I32")
# Of the experts that a token id goes to: the one kind of tensor that holds no weights.
TABLE = ".tid2eid"
SCALES = ("F32", "BF16", "F8_E8M0")
# Of DeepSeek V4's experts: two e2m1 values.
PACKED = ("I8",)
EXPERT_DTYPE = "expert_dtype"
# Of a routed expert, by DeepSeek V4's names; `.shared_experts.` does not have it.
EXPERT = ".experts."
MX_BLOCK_BYTES = MX_BLOCK // 2

ExpertFormat = type[Fp8Experts] | type[Mxfp4Experts]


class Part(NamedTuple):
    """A stored tensor: the name, the shape and the dtype, one of these, that it must have. Scales must be finite."""

    name: str
    shape: Shape
    dtypes: tuple[str, ...]
    is_scale: bool = False

    def check(self, stored: torch.Tensor, name: str) -> None:
        """Raises ModelError, of the tensor that is stored under `name`."""
        if self.is_scale and not _factors(stored).isfinite().all():
            raise ModelError(name, "has a scale that is not a finite number")


def _factors(scales: torch.Tensor) -> torch.Tensor:
    """Returns scales in fp32. A byte is an exponent, counted from -127, and 255 is not a number."""
    return powers_of_two(scales) if scales.dtype is torch.uint8 else scales.float()


class WeightFormat(Protocol):
    def parts(self, name: str, shape: Shape, stored: Container[str]) -> tuple[Part, ...]:
        """Returns the stored tensors that make the one of this name and shape; `stored` has all stored names."""

    def decoded(self, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Returns the tensor that these parts make, on their device."""

    def expert_format(self, parts: Sequence[Part], num_joined: int) -> ExpertFormat | None:
        """Returns as what an expert's matrix of these parts may stay; None: it must be decoded. An expert has
        `num_joined` such matrices, row under row."""

    def expert_operand(self, parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the values and the scales of `expert_format`, those of one expert without its dimension."""


@dataclass(frozen=True, slots=True)
class Plain:
    """Every tensor as it is."""

    def parts(self, name: str, shape: Shape, stored: Container[str]) -> tuple[Part, ...]:
        return (Part(name, shape, WHOLES if name.endswith(TABLE) else FLOATS),)

    def decoded(self, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        return parts[0].to(dtype)

    def expert_format(self, parts: Sequence[Part], num_joined: int) -> ExpertFormat | None:
        return None

    def expert_operand(self, parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        raise AssertionError("plain tensors have no scales")


UNQUANTISED = Plain()


@dataclass(frozen=True, slots=True)
class Fp8Blocks:
    """Matrices as e4m3 with a factor for each block: `X.weight` with `X.weight_scale_inv`, as DeepSeek V3 stores them,
    or with `X.scale`, as DeepSeek V4 does.

    The last block of a row or column may be cut short.
    """

    block_rows: int
    block_columns: int

    @classmethod
    def read(cls, fields: Fields) -> Fp8Blocks:
        fmt, activations = fields.get("fmt", "e4m3"), fields.get("activation_scheme", "dynamic")
        if fmt != "e4m3":
            raise ModelError(f"{CONFIG}.fmt", f"{fmt!r} is not supported; 'e4m3' is")
        if activations != "dynamic":
            raise ModelError(f"{CONFIG}.activation_scheme", f"{activations!r} is not supported; 'dynamic' is")
        block = fields.get("weight_block_size")
        if not isinstance(block, list) or len(block) != 2 or any(type(size) is not int or size < 1 for size in block):
            wanted = "must be the rows and columns of a block, such as [128, 128]"
            raise ModelError(f"{CONFIG}.weight_block_size", f"{wanted}, not {block!r}")
        return cls(*block)

    def parts(self, name: str, shape: Shape, stored: Container[str]) -> tuple[Part, ...]:
        scales = next((scales for scales in (f"{name}_scale_inv", _scale_name(name)) if scales in stored), None)
        if len(shape) != 2 or scales is None:
            return UNQUANTISED.parts(name, shape, stored)
        blocks = (-(-shape[0] // self.block_rows), -(-shape[1] // self.block_columns))
        return Part(name, shape, ("F8_E4M3",)), Part(scales, blocks, SCALES, is_scale=True)

    def decoded(self, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Computes in fp32 and rounds once."""
        if len(parts) == 1:
            return UNQUANTISED.decoded(parts, dtype)
        return fp8_values(parts[0], _factors(parts[1]), (self.block_rows, self.block_columns)).to(dtype)

    def expert_format(self, parts: Sequence[Part], num_joined: int) -> ExpertFormat | None:
        """Rows of a matrix whose last block is cut short cannot be followed by another matrix's."""
        is_cut = parts[0].shape[0] % FP8_BLOCK > 0
        has_blocks = len(parts) == 2 and (self.block_rows, self.block_columns) == (FP8_BLOCK, FP8_BLOCK)
        return None if not has_blocks or (is_cut and num_joined > 1) else Fp8Experts

    def expert_operand(self, parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return parts[0], _factors(parts[1])


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """Experts as gpt-oss stores them: `X_blocks` has 32 e2m1 values in 16 bytes, the first in the low half of its byte,
    and `X_scales` has a power of two for each block of 32, counted from -127 (OCP Microscaling Formats 1.0).

    A plain file holds X as [experts, columns, rows], this one holds each row's blocks together, [experts, rows,
    columns / 32]: X is returned in the plain file's shape, as a view whose transpose is contiguous.
    """

    @classmethod
    def read(cls, _: Fields) -> Mxfp4:
        return cls()

    def parts(self, name: str, shape: Shape, stored: Container[str]) -> tuple[Part, ...]:
        if f"{name}_blocks" not in stored:
            return UNQUANTISED.parts(name, shape, stored)
        if len(shape) != 3:
            raise ModelError(name, f"is stored as mxfp4, which has no {list(shape)}")
        experts, columns, rows = shape
        blocks = (experts, rows, _blocks_of_row(name, columns))
        scales = Part(f"{name}_scales", blocks, ("U8",), is_scale=True)
        return Part(f"{name}_blocks", (*blocks, MX_BLOCK_BYTES), ("U8",)), scales

    def decoded(self, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        if len(parts) == 1:
            return UNQUANTISED.decoded(parts, dtype)
        return dequantised(Mxfp4Experts(*self.expert_operand(parts)), dtype).transpose(1, 2)

    def expert_format(self, parts: Sequence[Part], num_joined: int) -> ExpertFormat | None:
        return Mxfp4Experts if len(parts) == 2 else None

    def expert_operand(self, parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return parts[0].flatten(2), parts[1]


@dataclass(frozen=True, slots=True)
class Fp8WithMxfp4Experts:
    """As DeepSeek V4 is published: all as in `fp8`, but routed experts, which are `X.weight`, signed bytes [rows,
    columns / 2] of two e2m1 values each, the first in the low half, and `X.scale` e8m0 [rows, columns / 32]."""

    fp8: Fp8Blocks

    def parts(self, name: str, shape: Shape, stored: Container[str]) -> tuple[Part, ...]:
        if EXPERT not in name:
            return self.fp8.parts(name, shape, stored)
        rows, columns = shape
        blocks = _blocks_of_row(name, columns)
        scales = Part(_scale_name(name), (rows, blocks), ("F8_E8M0",), is_scale=True)
        return Part(name, (rows, blocks * MX_BLOCK_BYTES), PACKED), scales

    def decoded(self, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        if parts[0].dtype is not torch.int8:
            return self.fp8.decoded(parts, dtype)
        return mxfp4_values(*self.expert_operand(parts)).to(dtype)

    def expert_format(self, parts: Sequence[Part], num_joined: int) -> ExpertFormat | None:
        return Mxfp4Experts if parts[0].dtypes == PACKED else self.fp8.expert_format(parts, num_joined)

    def expert_operand(self, parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        if parts[0].dtype is not torch.int8:
            return self.fp8.expert_operand(parts)
        return parts[0].view(torch.uint8), parts[1].view(torch.uint8)


def _scale_name(name: str) -> str:
    """Returns DeepSeek V4's name of a weight's scales."""
    return f"{name.removesuffix('.weight')}.scale"


def _blocks_of_row(name: str, columns: int) -> int:
    if columns % MX_BLOCK:
        raise ModelError(name, f"is stored as mxfp4, whose rows of {columns} must divide by {MX_BLOCK}")
    return columns // MX_BLOCK


PLAIN, FP8, MXFP4 = "plain", "fp8", "mxfp4"


def _read_fp8(fields: Fields) -> WeightFormat:
    blocks = Fp8Blocks.read(fields)
    dtype = fields.get(EXPERT_DTYPE) or FP8
    if dtype not in (FP8, "fp4"):
        raise ModelError(EXPERT_DTYPE, f"{dtype!r} is not supported; 'fp8' and 'fp4' are")
    return blocks if dtype == FP8 else Fp8WithMxfp4Experts(blocks)


# By quant_method.
QUANTISED: Mapping[str, Callable[[Fields], WeightFormat]] = {FP8: _read_fp8, MXFP4: Mxfp4.read}


def read_weight_format(fields: Fields, supported: Sequence[str], architecture: str) -> WeightFormat:
    """Returns the format that the config's `quantization_config` names; without one the weights are plain."""
    config = fields.get(CONFIG)
    if not config:
        return UNQUANTISED
    if not isinstance(config, dict):
        raise ModelError(CONFIG, f"must be an object, not {config!r}")
    method = config.get("quant_method")
    known = [name for name in supported if name in QUANTISED]
    if method not in known:
        raise ModelError(
            f"{CONFIG}.quant_method",
            f"{method!r} is not supported for {architecture}; {' and '.join(map(repr, known)) or 'no other'} "
            f"and weights that are not quantised are",
        )
    # What the routed experts are stored in is said beside `quantization_config`.
    return QUANTISED[method]({**config, EXPERT_DTYPE: fields.get(EXPERT_DTYPE)})
