"""How a checkpoint stores its weights: plain, fp8 with a scale for each block, mxfp4, or fp8 beside experts in mxfp4.

The model computes in its own dtype. A format says which stored tensors make one of the model's, and makes it from them,
one tensor at a time. Which tensors of a quantised checkpoint are stored plain (norms, embeddings, routers) is told by
the names in its files.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

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
EXPERT_DTYPE = "expert_dtype"
# Of a routed expert, by DeepSeek V4's names; `.shared_experts.` does not have it.
EXPERT = ".experts."
# Values of a block with one scale, and bytes that it takes, by OCP Microscaling Formats 1.0.
MX_BLOCK, MX_BLOCK_BYTES = 32, 16


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
    return (scales.view(torch.float8_e8m0fnu) if scales.dtype is torch.uint8 else scales).float()


class WeightFormat(Protocol):
    def parts(self, name: str, shape: Shape, stored: Container[str]) -> tuple[Part, ...]:
        """Returns the stored tensors that make the one of this name and shape; `stored` has all stored names."""

    def decoded(self, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Returns the tensor that these parts make, on their device."""


@dataclass(frozen=True, slots=True)
class Plain:
    """Every tensor as it is."""

    def parts(self, name: str, shape: Shape, stored: Container[str]) -> tuple[Part, ...]:
        return (Part(name, shape, WHOLES if name.endswith(TABLE) else FLOATS),)

    def decoded(self, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        return parts[0].to(dtype)


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
        values, scales = parts[0].float(), _factors(parts[1])
        of_column = scales.repeat_interleave(self.block_columns, dim=1)[:, : values.shape[1]]
        whole, columns = values.shape[0] // self.block_rows, values.shape[1]
        cut = whole * self.block_rows
        values[:cut].view(whole, self.block_rows, columns).mul_(of_column[:whole].unsqueeze(1))
        values[cut:].mul_(of_column[-1])
        return values.to(dtype)


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
        """One expert at a time, so that the fp32 values in between take the memory of one."""
        if len(parts) == 1:
            return UNQUANTISED.decoded(parts, dtype)
        blocks, scales = parts
        experts, rows, blocks_of_row, _ = blocks.shape
        values = torch.empty(experts, rows, blocks_of_row * MX_BLOCK, dtype=dtype, device=blocks.device)
        for expert in range(experts):
            values[expert] = _decoded_mxfp4(blocks[expert], scales[expert])
        return values.transpose(1, 2)


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
        return Part(name, (rows, blocks * MX_BLOCK_BYTES), ("I8",)), scales

    def decoded(self, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        if parts[0].dtype is not torch.int8:
            return self.fp8.decoded(parts, dtype)
        packed, scales = parts
        blocks = packed.view(torch.uint8).view(*scales.shape, MX_BLOCK_BYTES)
        return _decoded_mxfp4(blocks, scales).to(dtype)


def _scale_name(name: str) -> str:
    """Returns DeepSeek V4's name of a weight's scales."""
    return f"{name.removesuffix('.weight')}.scale"


def _blocks_of_row(name: str, columns: int) -> int:
    if columns % MX_BLOCK:
        raise ModelError(name, f"is stored as mxfp4, whose rows of {columns} must divide by {MX_BLOCK}")
    return columns // MX_BLOCK


def _decoded_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Returns fp32 [rows, columns] of bytes [rows, columns / 32, 16] and scales [rows, columns / 32]."""
    halves = _pairs_of_e2m1(blocks.device)[blocks.int()].flatten(2)
    return halves.mul_(_factors(scales).unsqueeze(-1)).flatten(1)


def _pairs_of_e2m1(device: torch.device) -> torch.Tensor:
    """Returns the two values of each byte, fp32 [256, 2]."""
    positive = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    values = torch.tensor([*positive, *(-value for value in positive)], device=device)
    byte = torch.arange(256, device=device)
    return torch.stack([values[byte & 15], values[byte >> 4]], dim=1)


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
