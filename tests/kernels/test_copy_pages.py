"""pack_pages and unpack_pages: raw bytes of whole pages, any dtype, one plane or many."""

import pytest
import torch

from kernels.backend import Backend
from kernels.copy_pages import pack_pages, page_row_bytes, unpack_pages
from kernels.errors import KernelArgumentError
from tests.kernels.compare import assert_same_bits
from tests.kernels.target import Target


def random_bytes(size: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, size, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def check(pages: torch.Tensor, ids: list[int], page_axis: int, target: Target, id_dtype: torch.dtype) -> None:
    """Packed rows hold the pages' bytes in the order of planes; unpacking them elsewhere restores those pages only."""
    pages, page_ids = pages.to(target.device), torch.tensor(ids, dtype=id_dtype, device=target.device)
    packed = torch.empty(len(ids), page_row_bytes(pages, page_axis), dtype=torch.uint8, device=target.device)
    pack_pages(pages, page_ids, packed, page_axis=page_axis, backend=target.backend)
    picked = pages.index_select(page_axis, page_ids.long()).movedim(page_axis, 0).contiguous()
    assert_same_bits(packed, picked.view(torch.uint8).view(len(ids), -1))
    fresh = torch.zeros_like(pages)
    unpack_pages(packed, fresh, page_ids, page_axis=page_axis, backend=target.backend)
    kept = pages.index_select(page_axis, page_ids.long())
    assert_same_bits(fresh, torch.zeros_like(pages).index_copy_(page_axis, page_ids.long(), kept))


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8, torch.int64], ids=str)
def test_layers_of_keys_and_values(target: Target, dtype: torch.dtype, id_dtype: torch.dtype) -> None:
    """[layers, K and V, pages, slots, heads, dim] in one call."""
    pages = random_bytes((3, 2, 9, 16, 2, 8 * dtype.itemsize)).view(dtype)
    check(pages, [7, 1, 8, 3], 2, target, id_dtype)


@pytest.mark.parametrize("row_bytes", [1, 2, 6, 7, 1152, 4096, 32768, 4100])
def test_widths(target: Target, row_bytes: int) -> None:
    """Rows that fit 8-, 4-, 2- and 1-byte words, shorter and longer than one program's chunk."""
    check(random_bytes((6, row_bytes)), [5, 0, 2], 0, target, torch.int32)


def test_views_that_start_off_a_word(target: Target) -> None:
    whole = random_bytes((1 + 6 * 16,)).to(target.device)
    check(whole[1:].view(6, 16), [4, 1], 0, target, torch.int32)
    packed = torch.zeros(1 + 2 * 16, dtype=torch.uint8, device=target.device)
    ids = torch.tensor([4, 1], device=target.device)
    pack_pages(whole[:96].view(6, 16), ids, packed[1:].view(2, 16), backend=target.backend)
    assert_same_bits(packed[1:17], whole[64:80])
    assert packed[0].item() == 0


def test_one_page_may_be_packed_twice(target: Target) -> None:
    pages = random_bytes((4, 40)).to(target.device)
    packed = torch.empty(3, 40, dtype=torch.uint8, device=target.device)
    pack_pages(pages, torch.tensor([2, 2, 0], device=target.device), packed, backend=target.backend)
    assert_same_bits(packed, pages[[2, 2, 0]])


def test_no_pages(target: Target) -> None:
    pages = random_bytes((4, 40)).to(target.device)
    before, none = pages.clone(), torch.empty(0, dtype=torch.int64, device=target.device)
    empty = torch.empty(0, 40, dtype=torch.uint8, device=target.device)
    pack_pages(pages, none, empty, backend=target.backend)
    unpack_pages(empty, pages, none, backend=target.backend)
    assert_same_bits(pages, before)


def test_few_programs_do_the_same(target: Target) -> None:
    """What moves host memory: every program takes many chunks, over all planes and pages."""
    if target.backend is not Backend.TRITON:
        pytest.skip("a Triton kernel")
    from kernels.copy_pages.triton import launch

    pages = random_bytes((3, 5, 32808)).to(target.device)
    ids = torch.tensor([4, 1, 2], device=target.device)
    packed = torch.zeros(3, 3, 32808, dtype=torch.uint8, device=target.device)
    launch(pages, ids, packed, pack=True, on_host=True)
    assert_same_bits(packed, pages[:, ids].transpose(0, 1))
    fresh = torch.zeros_like(pages)
    launch(fresh, ids, packed, pack=False, on_host=True)
    assert_same_bits(fresh[:, ids], pages[:, ids])
    assert not fresh[:, [0, 3]].any()


@pytest.mark.gpu
def test_straight_to_host_memory_and_back() -> None:
    """Layers of K and V of a few pages, one launch each way, no staging on the device."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    pages = random_bytes((4, 2, 9, 16, 8, 256)).cuda()
    ids = torch.tensor([7, 1, 8], device="cuda")
    host = torch.zeros(3, page_row_bytes(pages, 2), dtype=torch.uint8, pin_memory=True)
    pack_pages(pages, ids, host, page_axis=2)
    torch.cuda.synchronize()
    assert_same_bits(host, pages[:, :, ids].movedim(2, 0).reshape(3, -1).cpu())
    fresh = torch.zeros_like(pages)
    unpack_pages(host, fresh, ids, page_axis=2)
    assert_same_bits(fresh[:, :, ids], pages[:, :, ids])
    with pytest.raises(KernelArgumentError, match="packed rows: must be on cuda:0 or in pinned host memory"):
        pack_pages(pages, ids, torch.zeros(host.shape, dtype=torch.uint8), page_axis=2)
