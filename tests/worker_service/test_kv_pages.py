"""Page tensors: groups by window, bytes in and out, the reserved page, and pools that a longest prompt fits into."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from session.words import GroupKind
from worker_service.core.errors import PoolError
from worker_service.gpu.kv_pages import KvPages, KvShape, check_pool, plan_pages, pool_budget

CPU = torch.device("cpu")


def shape(windows: Sequence[int], dtype: torch.dtype = torch.float32, page_tokens: int = 4) -> KvShape:
    return KvShape(tuple(windows), num_kv_heads=2, head_dim=8, dtype=dtype, page_tokens=page_tokens)


def numbered(pages: KvPages) -> KvPages:
    """Every element its own value."""
    for layer in range(len(pages.shape.windows)):
        for kind, tensor in enumerate(pages.layer_pages(layer)[:2]):
            values = torch.arange(tensor[1:].numel(), dtype=torch.float32).view(tensor[1:].shape)
            tensor[1:] = (values + 10_000 * (2 * layer + kind)).to(tensor.dtype)
    return pages


def test_layers_of_one_window_share_a_group() -> None:
    pages = KvPages(shape([8, 0, 8, 0, 8]), [6, 9], CPU)
    full, window = pages.specs()
    assert (full.name, full.kind, full.num_pages, full.window_tokens) == ("full", GroupKind.FULL, 6, 0)
    assert (window.name, window.kind, window.num_pages, window.window_tokens) == ("window8", GroupKind.WINDOW, 9, 8)
    assert full.page_bytes == 2 * 2 * 4 * 2 * 8 * 4
    assert window.page_bytes == 3 * 2 * 4 * 2 * 8 * 4
    assert [pages.layer_pages(layer).group for layer in range(5)] == [1, 0, 1, 0, 1]
    assert [pages.layer_pages(layer).window_tokens for layer in range(5)] == [8, 0, 8, 0, 8]
    assert pages.layer_pages(0).k.shape == (10, 4, 2, 8)


def test_every_layer_has_memory_of_its_own() -> None:
    pages = KvPages(shape([0, 4, 0]), [3, 3], CPU)
    for value in range(3):
        pages.layer_pages(value).k.fill_(2 * value)
        pages.layer_pages(value).v.fill_(2 * value + 1)
    for value in range(3):
        assert pages.layer_pages(value).k.unique().tolist() == [2 * value]
        assert pages.layer_pages(value).v.unique().tolist() == [2 * value + 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bytes_of_a_page_are_its_rows_of_all_layers(dtype: torch.dtype) -> None:
    pages = numbered(KvPages(shape([0, 8, 0], dtype), [5, 5], CPU))
    packed = pages.read_pages(0, [4, 2])
    assert packed.shape == (2, pages.page_bytes(0))
    for row, page_id in zip(packed, [4, 2], strict=True):
        rows = [tensor[page_id] for layer in (0, 2) for tensor in pages.layer_pages(layer)[:2]]
        assert torch.equal(row.view(dtype), torch.cat([tensor.flatten() for tensor in rows]))


def test_pages_move_between_workers_under_other_ids() -> None:
    source, target = numbered(KvPages(shape([0, 8]), [5, 5], CPU)), KvPages(shape([0, 8]), [7, 7], CPU)
    for group in range(2):
        target.write_pages(group, [7, 1, 3], source.read_pages(group, [2, 5, 4]))
    for layer in range(2):
        for there, here in zip(target.layer_pages(layer)[:2], source.layer_pages(layer)[:2], strict=True):
            assert torch.equal(there[[7, 1, 3]], here[[2, 5, 4]])
            assert there[[0, 2, 4, 5, 6]].count_nonzero() == 0


def test_a_callers_buffer_is_filled() -> None:
    pages = numbered(KvPages(shape([0]), [5], CPU))
    buffer = pages.host_buffer(0, 2)
    assert pages.read_pages(0, [1, 5], out=buffer).data_ptr() == buffer.data_ptr()
    assert torch.equal(buffer, pages.read_pages(0, [1, 5]))
    assert pages.read_pages(0, []).shape == (0, pages.page_bytes(0))


@pytest.mark.parametrize("page_ids", [[0], [6], [-1], [1, 2, 6]])
def test_page_ids_outside_the_pool_are_refused(page_ids: list[int]) -> None:
    """Page 0 stands for holes: nobody may write it, nobody needs its bytes."""
    pages = KvPages(shape([0]), [5], CPU)
    with pytest.raises(ValueError, match="page id"):
        pages.read_pages(0, page_ids)
    with pytest.raises(ValueError, match="page id"):
        pages.write_pages(0, page_ids, pages.host_buffer(0, len(page_ids)))


def test_wrong_buffers_are_refused() -> None:
    pages = KvPages(shape([0]), [5], CPU)
    good = pages.host_buffer(0, 2)
    for bad in (good[:1], good[:, :-1], good.view(torch.int32), torch.empty(2, 2 * good.shape[1]).byte()[:, ::2]):
        with pytest.raises(ValueError, match="page bytes"):
            pages.write_pages(0, [1, 2], bad)


def test_layout_id_tells_layouts_apart() -> None:
    base = KvPages(shape([0, 8]), [5, 5], CPU).layout_id
    others = [shape([0, 4]), shape([8, 0]), shape([0, 8], torch.float16), shape([0, 8], page_tokens=8)]
    ids = {KvPages(other, [5, 5], CPU).layout_id for other in others}
    assert len(ids | {base}) == 5
    assert KvPages(shape([0, 8]), [50, 40], CPU).layout_id == base


def test_pools_take_the_budget_and_no_more() -> None:
    both = shape([0, 8, 8])
    page_bytes = 3 * 2 * both.row_bytes()
    (full, window) = plan_pages(both, 1000 * page_bytes + 5, max_model_len=100, max_chunk_tokens=16)
    assert full == window == 999  # and the reserved page of each
    total = sum(spec.page_bytes * (spec.num_pages + 1) for spec in KvPages(both, (full, window), CPU).specs())
    assert total <= 1000 * page_bytes


def test_a_pool_too_small_for_one_longest_prompt_is_an_error() -> None:
    full = shape([0])
    page_bytes = 2 * full.row_bytes()
    assert plan_pages(full, 26 * page_bytes, max_model_len=100, max_chunk_tokens=16) == (25,)
    with pytest.raises(PoolError, match=r"max_model_len.*101 tokens needs 26 pages of group full.*has 25"):
        plan_pages(full, 26 * page_bytes, max_model_len=101, max_chunk_tokens=16)
    with pytest.raises(PoolError, match="has 0"):
        plan_pages(full, 10, max_model_len=101, max_chunk_tokens=16)


def test_a_window_pool_need_not_hold_the_whole_prompt() -> None:
    windowed = shape([8])
    check_pool(windowed, [12], max_model_len=10_000, max_chunk_tokens=16)  # 8 + 2 * 16 tokens, and two cut pages
    with pytest.raises(PoolError, match="window8"):
        check_pool(windowed, [11], max_model_len=10_000, max_chunk_tokens=16)
    check_pool(windowed, [3], max_model_len=12, max_chunk_tokens=16)


@pytest.mark.parametrize("num_pages", [[], [5, 5], [0]])
def test_pool_counts_must_match_the_groups(num_pages: list[int]) -> None:
    with pytest.raises(PoolError, match="num_pages"):
        KvPages(shape([0]), num_pages, CPU)


def test_budget_of_a_cpu_is_what_was_configured() -> None:
    assert pool_budget(CPU, 0.9, 123456) == 123456
