"""How the pairs of an expert layer are divided: sorted by expert, and cut into tiles of rows of one expert each."""

import math
from typing import NamedTuple

import torch

# Rows of a tile: those of an expert that few tokens chose are one small tile, those of a prompt's large ones.
TILE_ROWS = (16, 32, 64, 128)


class ExpertPlan(NamedTuple):
    """A pair is a token and one of its top_k experts: pair token * top_k + place. All tensors are int32.

    order      [num_pairs]: the pairs by expert, those of one expert in ascending order
    starts     [num_experts + 1]: where each expert's pairs begin in `order`, and where the last one's end
    tiles      [max_tiles, 2]: of each tile its expert and the place in `order` where it begins, in order
    num_tiles  [1]: how many of them there are; their places behind that are not written
    """

    order: torch.Tensor
    starts: torch.Tensor
    tiles: torch.Tensor
    num_tiles: torch.Tensor
    top_k: int
    tile_rows: int

    @property
    def num_pairs(self) -> int:
        return self.order.shape[0]

    @property
    def num_experts(self) -> int:
        return self.starts.shape[0] - 1


def max_tiles(num_pairs: int, num_experts: int, tile_rows: int) -> int:
    """Returns a bound on the tiles of any choice of experts: each one that is chosen fills all its tiles but one."""
    return (num_pairs + min(num_pairs, num_experts) * (tile_rows - 1)) // tile_rows


def usual_tile_rows(num_pairs: int, num_experts: int) -> int:
    """Returns the smallest tile with room for an average expert's rows and twice the square root of their number
    more, or the largest one.

    Choices are uneven, with a deviation of about that root, and an expert whose rows are two tiles has its weights
    multiplied in two programs. On an H200 48 rows an expert (2,048 tokens of DeepSeek V4 Flash) took 2,120 us with
    tiles of 64 and 2,170 with 128, in mxfp4 1,553 and 2,093; 64 rows (DeepSeek V3) 4,493 and 3,803; 16 rows (512 tokens
    of it) 4,145 with 16, 3,436 with 32 and 3,553 with 64.
    """
    mean = num_pairs / num_experts
    return next((rows for rows in TILE_ROWS if rows >= mean + 2 * math.sqrt(mean)), TILE_ROWS[-1])


def empty_plan(expert_ids: torch.Tensor, num_experts: int, tile_rows: int) -> ExpertPlan:
    """Returns a plan whose tensors are to be filled; their sizes follow from sizes alone."""
    num_pairs = expert_ids.numel()

    def empty(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int32, device=expert_ids.device)

    tiles = empty(max_tiles(num_pairs, num_experts, tile_rows), 2)
    return ExpertPlan(empty(num_pairs), empty(num_experts + 1), tiles, empty(1), expert_ids.shape[1], tile_rows)
