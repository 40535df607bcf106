"""What programs hand on that share the keys of few rows."""

import torch

from kernels.prefill_attention.hopper.few import KEY_TILE, MOST_ROW_TILES

__all__ = ["SLOTS", "FewRows", "few_rows_bytes"]

# Tiles of 64 rows and KEY_TILE keys for which there is room, half of it for one round: 16 MiB of weights.
SLOTS = 1024


def few_rows_bytes(dim: int) -> int:
    """Returns the memory of one plan's scratch."""
    floats = 3 * SLOTS * 64 + MOST_ROW_TILES * 64 * (2 + dim + dim // 64)
    return 4 * floats + 2 * SLOTS * 64 * KEY_TILE


class FewRows:
    """The scratch of launches of few rows, and what is known of the step at hand."""

    def __init__(self, dim: int, half_queries: int, device: torch.device) -> None:
        def floats(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.float32, device=device)

        self._half_queries = half_queries
        # Of each row of a tile: its largest score, the factor of what came before, and the sum of its weights.
        self.rows = tuple(floats(SLOTS, 64) for _ in range(3))
        self._weights = torch.empty(SLOTS, 64, KEY_TILE, dtype=torch.bfloat16, device=device)
        # Between rounds: the rows' bases, of this round and the one before, and the sums of their values and weights.
        self.states = (
            floats(MOST_ROW_TILES, 2, 64),
            floats(MOST_ROW_TILES, 64, dim),
            floats(MOST_ROW_TILES, 64, dim // 64),
        )
        # Programs that are done with something; 0 between launches.
        self.counters = torch.zeros(5, dtype=torch.int32, device=device)
        # Tiles of the step, halves of a tile that have rows, key tiles of the longest.
        self.extent = torch.zeros(3, dtype=torch.int32, device=device)

    def weights(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns the room for weights of a 16-bit type."""
        return self._weights.view(dtype)

    def measure(self, tiles: torch.Tensor, num_tiles: torch.Tensor) -> None:
        """Measures a step's tiles, int32 [max_tiles, RECORD], on the device."""
        from kernels.prefill_attention.hopper.few.measure import launch

        launch(tiles, num_tiles, self.extent, self._half_queries)
