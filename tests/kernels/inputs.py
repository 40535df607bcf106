"""Paged inputs for tests and benchmarks: ragged lengths, permuted and shared pages, poison in everything unused.

Pages are written by plain indexing straight from the definition of each layout, not through the package's own helpers.
Everything that no sequence holds is NaN: page 0, spare pages, the tail of a last page, and pages that a window has left
behind (their table entries are page 0, the hole).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kernels.layout import KvLayout, PageShape, page_shape, page_tensor_shapes

POISON = float("nan")
SPARE_PAGES = 3
# Of scores: the bases of weights move now and then, by whole numbers in each tile, to the largest score of each tile.
RISES = [2.0, 20.0, 130.0]


@dataclass(frozen=True, slots=True)
class PagedCase:
    """A batch, paged and dense at once. A sequence has `cached` tokens before its `new` ones."""

    lengths: tuple[tuple[int, int], ...]
    layout: KvLayout
    window: int
    q: torch.Tensor
    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    block_tables: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor

    @property
    def max_seqlen_q(self) -> int:
        return max(new for _, new in self.lengths)

    @property
    def total_tokens(self) -> int:
        return sum(cached + new for cached, new in self.lengths)

    @property
    def page_tokens(self) -> int:
        return page_shape(self.k_pages, self.layout).page_tokens

    @property
    def seqlens_k(self) -> torch.Tensor:
        return self.cu_seqlens_k.diff()


@dataclass(frozen=True, slots=True)
class CaseShape:
    """What every sequence of a batch has in common."""

    page_tokens: int = 16
    q_heads: int = 4
    kv_heads: int = 2
    dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    layout: KvLayout = KvLayout.NHD
    window: int = 0
    shared_pages: int = 0
    device: str = "cpu"
    rise: float = 0.0  # of a row's scores from 128 keys to the next 128, in powers of two


def write_tokens(
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page: torch.Tensor,
    slot: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: KvLayout,
) -> None:
    """k, v [n, heads, dim] into slot[i] of page[i]."""
    if layout is KvLayout.NHD:
        k_pages[page, slot], v_pages[page, slot] = k, v
    elif layout is KvLayout.HND:
        k_pages[page, :, slot], v_pages[page, :, slot] = k, v
    else:
        x = k_pages.shape[-1]
        k_pages[page, :, :, slot, :] = k.reshape(*k.shape[:2], k.shape[2] // x, x)
        v_pages[page, :, slot // x, :, slot % x] = v


def running_sums(counts: Sequence[int], device: str = "cpu") -> torch.Tensor:
    """int32 [len(counts) + 1], from 0."""
    return torch.tensor([0, *counts]).cumsum(0).to(torch.int32).to(device)


def poisoned_pages(
    shape: PageShape, dtype: torch.dtype, layout: KvLayout, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Key and value pages full of NaN."""
    k_shape, v_shape = page_tensor_shapes(shape, dtype, layout)
    return (
        torch.full(k_shape, POISON, dtype=dtype, device=device),
        torch.full(v_shape, POISON, dtype=dtype, device=device),
    )


def make_case(lengths: Sequence[tuple[int, int]], shape: CaseShape, seed: int = 0) -> PagedCase:
    """A batch of (cached, new) sequences; the first `shared_pages` pages of sequence 0 begin every longer sequence."""
    rng = torch.Generator(shape.device).manual_seed(seed)
    totals = [cached + new for cached, new in lengths]
    keys, values = (_dense(totals, shape, rng) for _ in range(2))
    q = _random((sum(new for _, new in lengths), shape.q_heads, shape.dim), shape.dtype, rng)
    if shape.rise:
        q[..., 0] = 1.0
        for rows in keys:
            rows[..., 0] = (torch.arange(len(rows)) * _level(shape)).to(rows)[:, None]
    tables = _block_tables(lengths, shape, seed)
    num_pages = 1 + sum(-(-total // shape.page_tokens) for total in totals) + SPARE_PAGES
    k_pages, v_pages = poisoned_pages(
        PageShape(num_pages, shape.page_tokens, shape.kv_heads, shape.dim), shape.dtype, shape.layout, shape.device
    )
    for row, (cached, new), k, v in zip(tables, lengths, keys, values, strict=True):
        first = _first_needed(cached, shape)
        position = torch.arange(first, cached + new)
        page, slot = row.long()[position // shape.page_tokens], position % shape.page_tokens
        where = (page.to(shape.device), slot.to(shape.device))
        write_tokens(k_pages, v_pages, *where, k[first:], v[first:], shape.layout)
    return PagedCase(
        lengths=tuple(lengths),
        layout=shape.layout,
        window=shape.window,
        q=q,
        keys=keys,
        values=values,
        k_pages=k_pages,
        v_pages=v_pages,
        block_tables=tables.to(shape.device),
        cu_seqlens_q=running_sums([new for _, new in lengths], shape.device),
        cu_seqlens_k=running_sums(totals, shape.device),
    )


def _level(shape: CaseShape) -> float:
    """Returns by how much a key's first element exceeds that of the key before, with queries whose first one is 1."""
    return shape.rise / 128 * shape.dim**0.5 * math.log(2.0)


def _dense(totals: Sequence[int], shape: CaseShape, rng: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Random rows of every sequence, equal where pages are shared."""
    rows = [_random((total, shape.kv_heads, shape.dim), shape.dtype, rng) for total in totals]
    for row in rows[1:]:
        shared = _num_shared(totals[0], row.shape[0], shape) * shape.page_tokens
        row[:shared] = rows[0][:shared]
    return tuple(rows)


def _block_tables(lengths: Sequence[tuple[int, int]], shape: CaseShape, seed: int) -> torch.Tensor:
    """Page ids in random order, none twice but for shared ones; 0, the hole, where a row or a window has no page."""
    totals = [cached + new for cached, new in lengths]
    counts = [-(-total // shape.page_tokens) for total in totals]
    order = torch.randperm(sum(counts) + SPARE_PAGES, generator=torch.Generator().manual_seed(seed)) + 1
    tables = torch.zeros(len(lengths), max([*counts, 1]) + 2, dtype=torch.int32)
    taken = 0
    for seq, ((cached, _), total, count) in enumerate(zip(lengths, totals, counts, strict=True)):
        shared = _num_shared(totals[0], total, shape) if seq else 0
        tables[seq, :shared] = tables[0, :shared]
        tables[seq, shared:count] = order[taken : taken + count - shared]
        tables[seq, : _first_needed(cached, shape) // shape.page_tokens] = 0
        taken += count - shared
    return tables


def _num_shared(first_total: int, total: int, shape: CaseShape) -> int:
    return min(shape.shared_pages, first_total // shape.page_tokens, total // shape.page_tokens)


def _first_needed(cached: int, shape: CaseShape) -> int:
    """The first position that a new token sees."""
    return max(0, cached - shape.window + 1) if shape.window else 0


def spread_pages(case: PagedCase) -> PagedCase:
    """The same batch in a pool whose last page starts beyond 2^31 elements; what lies between is not touched."""
    count, size = case.k_pages.shape[0], case.k_pages[0].numel()
    stride = (2**31 // (count - 1) // 8 + size) * 8
    pool = torch.empty((count - 1) * stride + 2 * size, dtype=case.q.dtype, device=case.q.device)
    layout = (stride, *case.k_pages.stride()[1:])
    k_pages = pool.as_strided(case.k_pages.shape, layout)
    v_pages = pool[size:].as_strided(case.v_pages.shape, (stride, *case.v_pages.stride()[1:]))
    k_pages.copy_(case.k_pages)
    v_pages.copy_(case.v_pages)
    return replace(case, k_pages=k_pages, v_pages=v_pages)


def far_pages(pages: torch.Tensor) -> torch.Tensor:
    """Returns the same pages, the last of which starts beyond 2^31 elements; what lies between is not touched."""
    count, size = pages.shape[0], pages[0].numel()
    stride = (2**31 // (count - 1) // 8 + size) * 8
    pool = torch.empty((count - 1) * stride + size, dtype=pages.dtype, device=pages.device)
    return pool.as_strided(pages.shape, (stride, *pages.stride()[1:])).copy_(pages)


def _random(size: tuple[int, ...], dtype: torch.dtype, rng: torch.Generator) -> torch.Tensor:
    return torch.randn(size, generator=rng, device=rng.device).to(dtype)
