"""Units of a prefill step, which are segments of its tiles, and the memory in which programs hand their states on."""

import torch

from kernels.device import num_multiprocessors
from kernels.prefill_attention.hopper import TILE_ROWS, padded_dim
from kernels.prefill_attention.segments import KEY_TILE

__all__ = ["SPLIT_TILES", "Units", "states_bytes"]

# int32 fields of one unit: 32 bytes.
UNIT = 8
# A step whose tiles are split has at most this number of them, for one kv head.
SPLIT_TILES = 256
# Units for each multiprocessor: 128 rows of fp32 each, 79 MB in all for dim 128 on a card of 132.
UNITS_PER_PROGRAM = 8


def states_bytes(dim: int, programs: int) -> int:
    """Returns the memory of one plan's states, for as many programs as the device has multiprocessors."""
    return 4 * _state_rows(programs) * (padded_dim(dim) + 2)


def _state_rows(programs: int) -> int:
    """Returns the rows of all units, and of one tile more for each program: the total of one that it computes whole."""
    return programs * (UNITS_PER_PROGRAM + 1) * TILE_ROWS


class Units:
    """The list of units, empty where a step's tiles are computed whole, and (acc, base, sum) of their rows."""

    def __init__(self, kv_heads: int, dim: int, tile_queries: int, segment_tokens: int, device: torch.device) -> None:
        self._sizes = {"heads": kv_heads, "tile_queries": tile_queries, "segment": segment_tokens}
        self.count = torch.zeros(1, dtype=torch.int32, device=device)
        self._programs = num_multiprocessors(self.count.device)
        rows = _state_rows(self._programs)
        self.records = torch.empty(
            self._programs * UNITS_PER_PROGRAM // kv_heads, UNIT, dtype=torch.int32, device=device
        )
        # How many units of a tile are done, of each kv head and consumer; 0 between launches.
        self.arrivals = torch.zeros(SPLIT_TILES * kv_heads * 2, dtype=torch.int32, device=device)
        self.states = tuple(
            torch.empty(size, dtype=torch.float32, device=device) for size in (rows * padded_dim(dim), rows, rows)
        )

    def list(self, tiles: torch.Tensor, num_tiles: torch.Tensor) -> None:
        """Lists the units of tiles that were placed before, int32 [max_tiles, RECORD], if a split takes less time."""
        from kernels.prefill_attention.splits_triton import launch

        launch(
            tiles,
            num_tiles,
            self.records,
            self.count,
            **self._sizes,
            tile_keys=KEY_TILE,
            programs=self._programs,
            max_tiles=SPLIT_TILES,
        )
