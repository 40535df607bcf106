"""append_kv: every token in its slot, nothing else touched."""

import pytest
import torch

from kernels.append_kv import append_kv
from kernels.layout import KvLayout, PageShape
from tests.kernels.compare import assert_same_bits
from tests.kernels.inputs import poisoned_pages, write_tokens
from tests.kernels.target import Target

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def rows(tokens: int, heads: int, dim: int, dtype: torch.dtype, device: str, seed: int = 0) -> torch.Tensor:
    return torch.randn(tokens, heads, dim, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def check(target: Target, shape: PageShape, dtype: torch.dtype, layout: KvLayout, slots: torch.Tensor) -> None:
    k, v = (rows(len(slots), shape.heads, shape.dim, dtype, target.device, seed) for seed in (0, 1))
    got_k, got_v = (pages.to(target.device) for pages in poisoned_pages(shape, dtype, layout))
    append_kv(k, v, got_k, got_v, slots.to(target.device), layout=layout, backend=target.backend)
    wanted_k, wanted_v = poisoned_pages(shape, dtype, layout)
    kept = slots >= 0
    page, slot = slots[kept] // shape.page_tokens, slots[kept] % shape.page_tokens
    write_tokens(wanted_k, wanted_v, page, slot, k.cpu()[kept], v.cpu()[kept], layout)
    assert_same_bits(got_k.cpu(), wanted_k)
    assert_same_bits(got_v.cpu(), wanted_v)


@pytest.mark.parametrize("layout", list(KvLayout))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scattered_slots_with_padding(target: Target, dtype: torch.dtype, layout: KvLayout) -> None:
    slots = torch.randperm(9 * 16, generator=torch.Generator().manual_seed(1))[:37]
    slots[[0, 5, 36]] = -1
    check(target, PageShape(9, 16, 3, 80), dtype, layout, slots)


@pytest.mark.parametrize("page_tokens", [1, 16, 64, 256])
@pytest.mark.parametrize(("heads", "dim"), [(1, 64), (8, 128), (40, 128), (2, 192)])
def test_shapes(target: Target, page_tokens: int, heads: int, dim: int) -> None:
    slots = torch.randperm(5 * page_tokens, generator=torch.Generator().manual_seed(2))[:4]
    check(target, PageShape(5, page_tokens, heads, dim), torch.bfloat16, KvLayout.NHD, slots)


def test_all_padding_and_no_tokens_write_nothing(target: Target) -> None:
    for slots in (torch.tensor([-1, -1, -7]), torch.empty(0, dtype=torch.int64)):
        check(target, PageShape(2, 16, 2, 64), torch.bfloat16, KvLayout.NHD, slots)


def test_slots_of_a_block_table(target: Target) -> None:
    """Pages of 4, table [10, 20, 30, 40], six tokens from position 0: slots 40..43, 80, 81."""
    check(target, PageShape(50, 4, 1, 16), torch.bfloat16, KvLayout.NHD, torch.tensor([40, 41, 42, 43, 80, 81]))


def test_slices_of_a_fused_projection(target: Target) -> None:
    shape, slots = PageShape(3, 16, 2, 64), torch.tensor([17, 3, 40], device=target.device)
    fused = rows(3, 8, 64, torch.bfloat16, target.device)
    got_k, got_v = (pages.to(target.device) for pages in poisoned_pages(shape, torch.bfloat16, KvLayout.NHD))
    append_kv(fused[:, 4:6], fused[:, 6:8], got_k, got_v, slots, backend=target.backend)
    assert_same_bits(got_k.view(48, 2, 64)[slots], fused[:, 4:6])
    assert_same_bits(got_v.view(48, 2, 64)[slots], fused[:, 6:8])


def test_keys_and_values_interleaved_in_one_tensor(target: Target) -> None:
    pages = torch.zeros(4, 2, 16, 2, 64, dtype=torch.bfloat16, device=target.device)
    k, v = (rows(2, 2, 64, torch.bfloat16, target.device, seed) for seed in (0, 1))
    append_kv(k, v, pages[:, 0], pages[:, 1], torch.tensor([33, 5], device=target.device), backend=target.backend)
    assert_same_bits(pages[2, 0, 1], k[0])
    assert_same_bits(pages[0, 1, 5], v[1])
    assert int(pages.ne(0).any(dim=(-1, -2)).sum()) == 4


def test_a_pool_beyond_two_billion_elements(target: Target) -> None:
    """Pages lie 2^30 elements apart in memory that is never touched, so that page 2 needs a 64-bit address."""
    stride = 2**30
    pool = torch.empty(2 * stride + 16 * 64, dtype=torch.float16, device=target.device)
    pages = pool.as_strided((3, 16, 1, 64), (stride, 64, 64, 1))
    v_pages = torch.zeros(3, 16, 1, 64, dtype=torch.float16, device=target.device)
    k, v = (rows(1, 1, 64, torch.float16, target.device, seed) for seed in (0, 1))
    append_kv(k, v, pages, v_pages, torch.tensor([2 * 16 + 15], device=target.device), backend=target.backend)
    assert_same_bits(pool[2 * stride + 15 * 64 :], k[0, 0])
