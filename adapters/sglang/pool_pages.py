"""Pages between SGLang's pool of keys and values and host memory.

A page is its tokens in each array of the first layer, then in those of the second, and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class PoolPages:
    """Indices are those of SGLang's transfers: int64, one for each token, page after page."""

    def __init__(self, pool: Any, page_tokens: int) -> None:
        """Raises ValueError for a pool whose arrays are others."""
        arrays = _arrays(pool)
        # Bytes of a token: fp8 has no indexing of its own on a CPU.
        self._layers = [[array.flatten(1).view(torch.uint8) for array in layer] for layer in arrays]
        self._page_tokens = page_tokens
        self.device = arrays[0][0].device
        self.num_layers = len(arrays)
        self.layout = [[str(array.dtype), *array.shape[1:]] for layer in arrays for array in layer]
        self.page_bytes = page_tokens * sum(array.shape[1] for layer in self._layers for array in layer)

    def read(self, indices: torch.Tensor) -> torch.Tensor:
        """Returns uint8 [num_pages, page_bytes] in host memory; on a GPU it waits for what the current stream does."""
        num_pages = indices.numel() // self._page_tokens
        parts = [array[indices].view(num_pages, -1) for layer in self._layers for array in layer]
        return torch.cat(parts, dim=1).cpu()

    def staged(self, pages: Sequence[memoryview]) -> torch.Tensor:
        """Returns the pages as one uint8 tensor [num_pages, page_bytes] in host memory, pinned for a GPU."""
        stack = torch.empty((len(pages), self.page_bytes), dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        for row, page in zip(stack, pages, strict=True):
            row.copy_(torch.frombuffer(page, dtype=torch.uint8))
        return stack

    def write_layer(self, layer: int, indices: torch.Tensor, stack: torch.Tensor) -> None:
        """Writes one layer of pages from `staged` to the tokens' slots; on a GPU in the current stream."""
        first = sum(self._page_tokens * array.shape[1] for before in self._layers[:layer] for array in before)
        for array in self._layers[layer]:
            end = first + self._page_tokens * array.shape[1]
            part = stack[:, first:end].to(self.device, non_blocking=True)
            array[indices] = part.reshape(-1, array.shape[1])
            first = end


def _arrays(pool: Any) -> list[list[torch.Tensor]]:
    """Each layer's arrays: keys and values, or latents."""
    if hasattr(pool, "k_buffer") and hasattr(pool, "v_buffer"):
        arrays = [list(pair) for pair in zip(pool.k_buffer, pool.v_buffer, strict=True)]
    elif hasattr(pool, "kv_buffer"):
        arrays = [[latents] for latents in pool.kv_buffer]
    else:
        raise ValueError(f"the pool {type(pool).__name__} is not supported: it has no k_buffer, v_buffer or kv_buffer")
    if not arrays or not all(array.is_contiguous() for layer in arrays for array in layer):
        raise ValueError(f"the pool {type(pool).__name__} is not supported: its arrays are not contiguous")
    return arrays
