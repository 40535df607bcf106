"""Page tensors: groups by window, bytes in and out, the reserved page, pages of several tensors."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from session.words import GroupKind
from tests.worker_service.kv_layouts import kv_layouts
from worker_service.core.errors import PoolError
from worker_service.gpu.group_layout import MIXED_DTYPES, GroupLayout, PageTensor
from worker_service.gpu.page_pools import PagePools

CPU = torch.device("cpu")


def pools(
    windows: Sequence[int], counts: Sequence[int], dtype: torch.dtype = torch.float32, page_tokens: int = 4
) -> PagePools:
    return PagePools(kv_layouts(windows, dtype, page_tokens), counts, page_tokens, CPU)


def numbered(pages: PagePools) -> PagePools:
    """Every element its own value."""
    for layer in range(sum(len(layout.layers) for layout in pages.layouts)):
        for kind, tensor in enumerate(pages.planes(layer)):
            values = torch.arange(tensor[1:].numel(), dtype=torch.float32).view(tensor[1:].shape)
            tensor[1:] = (values + 10_000 * (2 * layer + kind)).to(tensor.dtype)
    return pages


def test_layers_of_one_window_share_a_group() -> None:
    pages = pools([8, 0, 8, 0, 8], [6, 9])
    full, window = pages.specs()
    assert (full.name, full.kind, full.num_pages, full.window_tokens) == ("full", GroupKind.FULL, 6, 0)
    assert (window.name, window.kind, window.num_pages, window.window_tokens) == ("window8", GroupKind.WINDOW, 9, 8)
    assert full.page_bytes == 2 * 2 * 4 * 2 * 8 * 4
    assert window.page_bytes == 3 * 2 * 4 * 2 * 8 * 4
    assert [pages.layer_pages(layer).group for layer in range(5)] == [1, 0, 1, 0, 1]
    assert pages.layer_pages(0).k.shape == (10, 4, 2, 8)


def test_every_layer_has_memory_of_its_own() -> None:
    pages = pools([0, 4, 0], [3, 3])
    for value in range(3):
        pages.layer_pages(value).k.fill_(2 * value)
        pages.layer_pages(value).v.fill_(2 * value + 1)
    for value in range(3):
        assert pages.layer_pages(value).k.unique().tolist() == [2 * value]
        assert pages.layer_pages(value).v.unique().tolist() == [2 * value + 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bytes_of_a_page_are_its_rows_of_all_layers(dtype: torch.dtype) -> None:
    pages = numbered(pools([0, 8, 0], [5, 5], dtype))
    packed = pages.read_pages(0, [4, 2])
    assert packed.shape == (2, pages.page_bytes(0))
    for row, page_id in zip(packed, [4, 2], strict=True):
        rows = [tensor[page_id] for layer in (0, 2) for tensor in pages.planes(layer)]
        assert torch.equal(row.view(dtype), torch.cat([tensor.flatten() for tensor in rows]))


def test_pages_move_between_workers_under_other_ids() -> None:
    source, target = numbered(pools([0, 8], [5, 5])), pools([0, 8], [7, 7])
    for group in range(2):
        target.write_pages(group, [7, 1, 3], source.read_pages(group, [2, 5, 4]))
    for layer in range(2):
        for there, here in zip(target.planes(layer), source.planes(layer), strict=True):
            assert torch.equal(there[[7, 1, 3]], here[[2, 5, 4]])
            assert there[[0, 2, 4, 5, 6]].count_nonzero() == 0


def test_a_callers_buffer_is_filled() -> None:
    pages = numbered(pools([0], [5]))
    buffer = pages.host_buffer(0, 2)
    assert pages.read_pages(0, [1, 5], out=buffer).data_ptr() == buffer.data_ptr()
    assert torch.equal(buffer, pages.read_pages(0, [1, 5]))
    assert pages.read_pages(0, []).shape == (0, pages.page_bytes(0))


@pytest.mark.parametrize("page_ids", [[0], [6], [-1], [1, 2, 6]])
def test_page_ids_outside_the_pool_are_refused(page_ids: list[int]) -> None:
    """Page 0 stands for holes: nobody may write it, nobody needs its bytes."""
    pages = pools([0], [5])
    with pytest.raises(ValueError, match="page id"):
        pages.read_pages(0, page_ids)
    with pytest.raises(ValueError, match="page id"):
        pages.write_pages(0, page_ids, pages.host_buffer(0, len(page_ids)))


def test_wrong_buffers_are_refused() -> None:
    pages = pools([0], [5])
    good = pages.host_buffer(0, 2)
    for bad in (good[:1], good[:, :-1], good.view(torch.int32), torch.empty(2, 2 * good.shape[1]).byte()[:, ::2]):
        with pytest.raises(ValueError, match="page bytes"):
            pages.write_pages(0, [1, 2], bad)


def test_layout_id_tells_layouts_apart() -> None:
    base = pools([0, 8], [5, 5]).layout_id
    others = [
        pools([0, 4], [5, 5]),
        pools([8, 0], [5, 5]),
        pools([0, 8], [5, 5], torch.float16),
        pools([0, 8], [5, 5], page_tokens=8),
    ]
    ids = {other.layout_id for other in others}
    assert len(ids | {base}) == 5
    assert pools([0, 8], [50, 40]).layout_id == base


@pytest.mark.parametrize("num_pages", [[], [5, 5], [0]])
def test_pool_counts_must_match_the_groups(num_pages: list[int]) -> None:
    with pytest.raises(PoolError, match="num_pages"):
        pools([0], num_pages)


def states() -> PagePools:
    """Two layers of a state with tensors of unlike shapes and types, beside one layer of keys and values."""
    (full,) = kv_layouts([0])
    tensors = (PageTensor(1, (3, 5), torch.bfloat16), PageTensor(2, (7,), torch.float32))
    return PagePools([full, GroupLayout("state", GroupKind.STATE, (1, 2), tensors)], [4, 6], 4, CPU)


def test_a_page_of_several_tensors_is_one_after_the_other() -> None:
    pages = numbered(states())
    assert pages.page_bytes(1) == 2 * (15 * 2 + 2 * 7 * 4)
    assert [spec.kind for spec in pages.specs()] == [GroupKind.FULL, GroupKind.STATE]
    spaced = PagePools(pages.layouts, [4, 6], 4, CPU, state_interval_tokens=8)
    assert [spec.state_interval_tokens for spec in spaced.specs()] == [0, 8]
    assert spaced.layout_id == pages.layout_id, "workers with other intervals share the host tier"
    (row,) = pages.read_pages(1, [3])
    planes = [pages.planes(layer) for layer in (1, 2)]
    wanted = [planes[0][0], planes[1][0], planes[0][1], planes[0][2], planes[1][1], planes[1][2]]
    assert torch.equal(row, torch.cat([plane[3].reshape(-1).view(torch.uint8) for plane in wanted]))


def test_pages_of_several_tensors_move_between_workers() -> None:
    source, target = numbered(states()), states()
    target.write_pages(1, [6, 1], source.read_pages(1, [2, 5]))
    for layer in (1, 2):
        for there, here in zip(target.planes(layer), source.planes(layer), strict=True):
            assert torch.equal(there[[6, 1]], here[[2, 5]])
            assert there[[0, 2, 3, 4, 5]].count_nonzero() == 0


@pytest.mark.parametrize("part_bytes", [1, 7, 28, 29, 60, 100, 1000])
def test_parts_of_a_page_are_its_bytes(part_bytes: int) -> None:
    source, target = numbered(states()), states()
    for group in range(2):
        size = source.page_bytes(group)
        (whole,) = source.read_pages(group, [3])
        for first in range(0, size, part_bytes):
            part = source.host_bytes(min(part_bytes, size - first))
            source.read_part(group, 3, first, part)
            assert torch.equal(part, whole[first : first + part_bytes])
            target.write_part(group, 2, first, part)
        assert torch.equal(target.read_pages(group, [2])[0], whole)
        assert target.read_pages(group, [1, 3, 4]).count_nonzero() == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("part_bytes", [64, 100, 1000])
def test_parts_of_a_page_on_a_device_are_its_bytes(part_bytes: int) -> None:
    """Cut inside planes, at their ends and across tensors, by way of pinned memory."""
    device = torch.device("cuda", 0)
    source, target = (PagePools(states().layouts, [4, 6], 4, device) for _ in range(2))
    for group in range(2):
        size = source.page_bytes(group)
        rows = torch.randint(0, 256, (1, size), dtype=torch.uint8)
        source.write_pages(group, [3], rows)
        for first in range(0, size, part_bytes):
            part = source.host_bytes(min(part_bytes, size - first))
            source.read_part(group, 3, first, part)
            assert part.is_pinned() and torch.equal(part, rows[0, first : first + part_bytes])
            target.write_part(group, 2, first, part)
        assert torch.equal(target.read_pages(group, [2]), rows)
        assert target.read_pages(group, [1, 3, 4]).count_nonzero() == 0


@pytest.mark.parametrize(("page_id", "first", "size"), [(0, 0, 4), (7, 0, 4), (1, -1, 4), (1, 170, 3), (1, 0, 0)])
def test_parts_outside_a_page_are_refused(page_id: int, first: int, size: int) -> None:
    pages = states()
    assert pages.page_bytes(1) == 172
    with pytest.raises(ValueError, match="group 1"):
        pages.read_part(1, page_id, first, pages.host_bytes(size))
    with pytest.raises(ValueError, match="group 1"):
        pages.write_part(1, page_id, first, torch.zeros(size, dtype=torch.uint8))


def test_a_header_tells_the_type_of_a_groups_elements() -> None:
    codes = [layout.dtype_code for layout in states().layouts]
    assert codes == [1, MIXED_DTYPES]
    others = (torch.float16, torch.bfloat16, torch.float8_e4m3fn)
    assert [kv_layouts([0], dtype)[0].dtype_code for dtype in others] == [2, 3, 4]
