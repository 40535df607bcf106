"""Paged inputs for tests and benchmarks: ragged lengths, permuted and shared pages, poison in everything unused.

Knows no op. Pages are written by plain indexing straight from the definition of each layout, not through the
package's own helpers. Everything that no sequence holds is NaN: page 0, spare pages, the tail of a last page, and
pages that a window has left behind (their table entries are page 0, the hole).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kernels.layout import KvLayout, PageShape, page_tensor_shapes

POISON = float("nan")


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
    rng, values_rng = torch.Generator().manual_seed(seed), torch.Generator(shape.device).manual_seed(seed)
    page_tokens, totals = shape.page_tokens, [cached + new for cached, new in lengths]
    counts = [-(-total // page_tokens) for total in totals]
    num_pages = 1 + sum(counts) + 3
    ids = iter((torch.randperm(num_pages - 1, generator=rng) + 1).tolist())
    k_pages, v_pages = poisoned_pages(
        PageShape(num_pages, page_tokens, shape.kv_heads, shape.dim), shape.dtype, shape.layout, shape.device
    )
    tables = torch.zeros(len(lengths), max([*counts, 1]) + 2, dtype=torch.int32)
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    for seq, (cached, new) in enumerate(lengths):
        total = cached + new
        k, v = (_random((total, shape.kv_heads, shape.dim), shape.dtype, values_rng) for _ in range(2))
        shared = min(shape.shared_pages, totals[0] // page_tokens, total // page_tokens) if seq else 0
        if shared:
            k[: shared * page_tokens] = keys[0][: shared * page_tokens]
            v[: shared * page_tokens] = values[0][: shared * page_tokens]
            tables[seq, :shared] = tables[0, :shared]
        for place in range(shared, counts[seq]):
            tables[seq, place] = next(ids)
        keys.append(k)
        values.append(v)
        first = max(0, cached - shape.window + 1) if shape.window else 0
        tables[seq, : first // page_tokens] = 0
        position = torch.arange(first, total)
        page, slot = tables[seq].long()[position // page_tokens], position % page_tokens
        page, slot = page.to(shape.device), slot.to(shape.device)
        write_tokens(k_pages, v_pages, page, slot, k[first:], v[first:], shape.layout)
    q = _random((sum(new for _, new in lengths), shape.q_heads, shape.dim), shape.dtype, values_rng)
    to = shape.device
    return PagedCase(
        lengths=tuple(lengths),
        layout=shape.layout,
        window=shape.window,
        q=q,
        keys=tuple(keys),
        values=tuple(values),
        k_pages=k_pages,
        v_pages=v_pages,
        block_tables=tables.to(to),
        cu_seqlens_q=running_sums([new for _, new in lengths], to),
        cu_seqlens_k=running_sums(totals, to),
    )


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


def _random(size: tuple[int, ...], dtype: torch.dtype, rng: torch.Generator) -> torch.Tensor:
    return torch.randn(size, generator=rng, device=rng.device).to(dtype)
