"""One of SGLang's host pools and its pages in the host tier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from adapters.sglang.stored_pages import StoredPages
from adapters.weights import Refused
from session.words import GroupKind
from tier_client.values import PageGroup

# SGLang's names of pools, and which of their pages a prefix needs.
KINDS = {
    "kv": GroupKind.FULL,
    "indexer": GroupKind.FULL,
    "swa": GroupKind.WINDOW,
    "mamba": GroupKind.STATE,
}


def host_group(name: str, pool: Any, window_tokens: Callable[[], int | None]) -> PageGroup:
    """Raises Refused for a pool that is not known. `window_tokens`: a token's own and those before it."""
    if name not in KINDS:
        raise Refused(f"the model has a pool {name!r}; the storage serves {', '.join(KINDS)}")
    page = pool.get_dummy_flat_data_page()
    window = (window_tokens() or 0) if KINDS[name] is GroupKind.WINDOW else 0
    if KINDS[name] is GroupKind.WINDOW and not window:
        raise Refused("the model has a pool of windows, but its configuration no sliding_window")
    return PageGroup(name, KINDS[name], page.numel() * page.element_size(), window)


class HostPool:
    """`pool` is SGLang's: pages are named by the index of their first row."""

    def __init__(self, pool: Any, stored: StoredPages) -> None:
        self.pool, self.stored = pool, stored
        self._dtype = pool.get_dummy_flat_data_page().dtype
        self.is_all = stored.group.kind is GroupKind.FULL

    def reach_pages(self, page_tokens: int) -> int:
        """Returns how many pages before a boundary are needed to resume there."""
        group = self.stored.group
        return -(-(group.window_tokens - 1) // page_tokens) if group.window_tokens else 1

    def read(self, keys: Sequence[str], host_indices: torch.Tensor) -> list[bool]:
        """Returns for each page whether it is in the pool now; those behind the first that is not are not."""
        slots = self._slots(keys, host_indices)
        values = self.stored.read(page_ids(keys)) if slots else []
        for slot, value in zip(slots, values, strict=False):
            self.pool.set_from_flat_data_page(slot, torch.frombuffer(value, dtype=torch.uint8).view(self._dtype))
        return [row < len(values) for row in range(len(keys))]

    def write(self, keys: Sequence[str], host_indices: torch.Tensor) -> list[bool]:
        slots = self._slots(keys, host_indices)
        pages = [self.pool.get_data_page(slot) for slot in slots]
        return [bool(slots) and self.keep(keys, pages)] * len(keys)

    def keep(self, keys: Sequence[str], pages: Sequence[torch.Tensor]) -> bool:
        rows = [page.contiguous().view(torch.uint8).numpy() for page in pages]
        return self.stored.write(page_ids(keys), [row.data for row in rows]) if keys else True

    def values(self, keys: Sequence[str]) -> list[torch.Tensor | None]:
        """Returns flat pages, None behind the first that is not there."""
        values = self.stored.read(page_ids(keys)) if keys else []
        found: list[torch.Tensor | None] = [
            torch.frombuffer(value, dtype=torch.uint8).view(self._dtype) for value in values
        ]
        return found + [None] * (len(keys) - len(found))

    def _slots(self, keys: Sequence[str], host_indices: torch.Tensor | None) -> list[int]:
        """Returns a slot for each page; none where there are not as many rows as pages have."""
        size = self.pool.page_size
        if host_indices is None or host_indices.numel() != len(keys) * size:
            return []
        return [int(slot) for slot in host_indices[::size].tolist()]


def page_ids(keys: Sequence[str]) -> list[bytes]:
    return [bytes.fromhex(key) for key in keys]
