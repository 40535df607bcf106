"""Groups of pages for tests: keys and values of layers with given windows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from session.words import GroupKind
from worker_service.gpu.group_layout import GroupLayout, PageTensor


def kv_layouts(
    windows: Sequence[int], dtype: torch.dtype = torch.float32, page_tokens: int = 4, head_dim: int = 8
) -> tuple[GroupLayout, ...]:
    """Two heads a layer; layers of one window share a group."""
    return tuple(
        GroupLayout(
            f"window{window}" if window else "full",
            GroupKind.WINDOW if window else GroupKind.FULL,
            tuple(layer for layer, other in enumerate(windows) if other == window),
            (PageTensor(2, (page_tokens, 2, head_dim), dtype),),
            window,
        )
        for window in sorted(set(windows))
    )
