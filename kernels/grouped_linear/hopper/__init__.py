"""grouped_linear's Gluon kernel for Hopper, for weights as checkpoints store them: which it takes, in which tiles."""

from typing import NamedTuple

import torch

from kernels.backend import is_hopper
from kernels.grouped_linear.stored import Fp8Experts, Mxfp4Experts, StoredExperts
from kernels.grouped_linear.words import ExpertWords, Fp8Words, Mxfp4Words, words_of

# Bytes at whose multiples a copy's rows begin.
ALIGNED_BYTES = 16
# TMA numbers the rows of all experts by int32.
MAX_ROWS = 2**31


class Tile(NamedTuple):
    """Outputs of a program, columns of the depth that each of its stages holds, and the stages of its ring."""

    block_n: int
    step: int
    stages: int


FP8_TILES = {16: Tile(64, 128, 4), 32: Tile(128, 128, 3), 64: Tile(128, 128, 3), 128: Tile(128, 64, 4)}
FP8_WORDS_TILES = FP8_TILES | {128: Tile(128, 128, 2)}
MXFP4_TILES = {16: Tile(128, 128, 3), 32: Tile(128, 128, 3), 64: Tile(128, 128, 3), 128: Tile(128, 64, 5)}


def tile_for(weight: Fp8Experts | ExpertWords, tile_rows: int) -> Tile:
    """Returns the tile for a plan of `tile_rows`: time depends on it, and no bit does."""
    if isinstance(weight, Mxfp4Words):
        return MXFP4_TILES[tile_rows]
    return (FP8_WORDS_TILES if isinstance(weight, Fp8Words) else FP8_TILES)[tile_rows]


def packed(weight: StoredExperts, dtype: torch.dtype) -> StoredExperts | ExpertWords:
    """Returns the weight in words if the kernel can multiply rows of that dtype by it, else as it is."""
    is_taken = dtype is torch.bfloat16 or (dtype is torch.float16 and isinstance(weight, Mxfp4Experts))
    if not is_taken or not is_hopper(weight.values.device):
        return weight
    words = words_of(weight)
    return weight if words is None else words


def reason_against(x: torch.Tensor, weight: object) -> str | None:
    """Returns why the kernel cannot multiply rows of x by a weight, or None."""
    if not is_hopper(x.device):
        return "needs a Hopper GPU"
    if not isinstance(weight, Fp8Experts | ExpertWords):
        return "needs a weight of fp8, or of mxfp4 as packed_experts returns it"
    if isinstance(weight, Fp8Words) and x.dtype is not torch.bfloat16:
        return f"needs bf16 rows, got {x.dtype}"
    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"needs 16-bit rows, got {x.dtype}"
    # In elements, though copies need it in bytes: of an argument the compiler knows only whether 16 divides it.
    if x.stride(0) % ALIGNED_BYTES or x.data_ptr() % ALIGNED_BYTES:
        return f"needs rows of x that are multiples of {ALIGNED_BYTES} elements apart"
    if isinstance(weight, ExpertWords):
        rows = weight.values[..., 0].numel()
        return None if rows < MAX_ROWS else f"needs fewer than {MAX_ROWS} rows of words, got {rows}"
    return _reason_against_values(weight.values)


def _reason_against_values(values: torch.Tensor) -> str | None:
    """TMA sees the weights as one matrix with the rows of all experts."""
    experts, _, width = values.shape
    expert_stride, row_stride, _ = values.stride()
    aligned = (width * values.element_size(), row_stride * values.element_size(), values.data_ptr())
    if not row_stride or any(size % ALIGNED_BYTES for size in aligned):
        return f"needs rows of values that are multiples of {ALIGNED_BYTES} bytes apart"
    if expert_stride % row_stride or experts * (expert_stride // row_stride) >= MAX_ROWS:
        return f"needs fewer than {MAX_ROWS} rows of values that are equally far apart"
    return None
