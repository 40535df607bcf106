"""Pages between one pool of SGLang's device memory and host memory.

A page is its rows in each array of the first layer, then in those of the second, and so on: the tokens of a page in a
pool of keys and values, one slot in a pool of recurrent states.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class PoolPages:
    """Indices are those of SGLang's transfers: int64, `page_rows` for each page, page after page."""

    def __init__(self, layers: Sequence[Sequence[torch.Tensor]], page_rows: int) -> None:
        """Raises ValueError for arrays that are not contiguous."""
        arrays = [array for layer in layers for array in layer]
        if not arrays or not all(array.is_contiguous() for array in arrays):
            raise ValueError("the pool's arrays are not contiguous")
        # Bytes of a row: fp8 has no indexing of its own on a CPU.
        self._layers = [[array.flatten(1).view(torch.uint8) for array in layer] for layer in layers]
        self._page_rows = page_rows
        self.device = arrays[0].device
        self.layout = [[str(array.dtype), *array.shape[1:]] for array in arrays]
        self.page_bytes = page_rows * sum(array.shape[1] for layer in self._layers for array in layer)

    def read(self, indices: torch.Tensor) -> torch.Tensor:
        """Returns uint8 [num_pages, page_bytes] in host memory; on a GPU it waits for what the current stream does."""
        num_pages = indices.numel() // self._page_rows
        parts = [array[indices].view(num_pages, -1) for layer in self._layers for array in layer]
        return torch.cat(parts, dim=1).cpu()

    def rows(self, indices: torch.Tensor, pages: Sequence[int]) -> torch.Tensor:
        """Returns the indices of some of the pages that `indices` is of, by their place in it."""
        whole = indices[: indices.numel() // self._page_rows * self._page_rows].view(-1, self._page_rows)
        return whole[torch.tensor(pages, device=indices.device)].flatten()

    def staged(self, pages: Sequence[memoryview]) -> torch.Tensor:
        """Returns the pages as one uint8 tensor [num_pages, page_bytes] in host memory, pinned for a GPU."""
        stack = torch.empty((len(pages), self.page_bytes), dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        for row, page in zip(stack, pages, strict=True):
            row.copy_(torch.frombuffer(page, dtype=torch.uint8))
        return stack

    def write_layer(self, layer: int, indices: torch.Tensor, stack: torch.Tensor) -> None:
        """Writes one layer of pages from `staged` to their rows; on a GPU in the current stream."""
        first = sum(self._page_rows * array.shape[1] for before in self._layers[:layer] for array in before)
        for array in self._layers[layer]:
            end = first + self._page_rows * array.shape[1]
            part = stack[:, first:end].to(self.device, non_blocking=True)
            array[indices] = part.reshape(-1, array.shape[1])
            first = end
