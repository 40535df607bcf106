"""grouped_linear's Gluon kernel for Hopper, for weights as checkpoints store them: which it takes, in which tiles."""

from typing import NamedTuple

import torch

from kernels.backend import is_hopper
from kernels.grouped_linear.stored import Fp8Experts, Mxfp4Experts, StoredExperts

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
MXFP4_TILES = {16: Tile(128, 128, 4), 32: Tile(128, 128, 4), 64: Tile(128, 64, 6), 128: Tile(128, 64, 5)}


def tile_for(weight: StoredExperts, tile_rows: int) -> Tile:
    """Returns the tile for a plan of `tile_rows`: time depends on it, and no bit does."""
    return (FP8_TILES if isinstance(weight, Fp8Experts) else MXFP4_TILES)[tile_rows]


def reason_against(x: torch.Tensor, weight: torch.Tensor | StoredExperts) -> str | None:
    """Returns why the kernel cannot multiply rows of x by a weight, or None."""
    if not is_hopper(x.device):
        return "needs a Hopper GPU"
    if isinstance(weight, torch.Tensor):
        return "needs a stored weight"
    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"needs 16-bit rows, got {x.dtype}"
    if x.stride(0) % ALIGNED_BYTES or x.data_ptr() % ALIGNED_BYTES:
        return f"needs rows of x that are multiples of {ALIGNED_BYTES} elements apart"
    if isinstance(weight, Mxfp4Experts) and x.dtype is not torch.bfloat16:
        return "needs rows of bfloat16 with mxfp4"
    return _reason_against_stored(weight)


def _reason_against_stored(weight: StoredExperts) -> str | None:
    """TMA sees the weights as one matrix with the rows of all experts; exponents are read two at a time."""
    values, scales = weight
    experts, _, depth = weight.shape
    expert_stride, row_stride, _ = values.stride()
    if depth % ALIGNED_BYTES or not row_stride or any(n % ALIGNED_BYTES for n in (row_stride, values.data_ptr())):
        return f"needs rows of values that are multiples of {ALIGNED_BYTES} bytes apart"
    if expert_stride % row_stride or experts * (expert_stride // row_stride) >= MAX_ROWS:
        return f"needs fewer than {MAX_ROWS} rows of values that are equally far apart"
    if isinstance(weight, Mxfp4Experts) and any(n % 2 for n in (*scales.shape[2:], *scales.stride()[:2])):
        return "needs an even number of exponents in a row"
    if isinstance(weight, Mxfp4Experts) and scales.data_ptr() % 2:
        return "needs exponents at an even address"
    return None
