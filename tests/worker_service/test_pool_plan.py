"""How one budget becomes pages of several groups, and pools that a longest prompt does not fit into."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.worker_service.kv_layouts import kv_layouts
from worker_service.core.errors import PoolError
from worker_service.gpu.group_layout import GroupLayout
from worker_service.gpu.pool_plan import (
    PoolDemand,
    check_pool,
    counts_for,
    leading,
    longest_prompt_pages,
    plan_pages,
    pool_budget,
    pool_bytes,
    running_pages,
)

DEMAND = PoolDemand(page_tokens=4, max_model_len=100, max_chunk_tokens=16, max_num_seqs=2, window_share=0.0)


def test_equal_counts_take_the_budget_and_no_more() -> None:
    layouts = kv_layouts([0, 8, 8])
    page_bytes = sum(layout.page_bytes for layout in layouts)
    counts = plan_pages(layouts, 1000 * page_bytes + 5, DEMAND._replace(window_share=1.0))
    assert counts == (999, 999)  # and the reserved page of each
    assert pool_bytes(layouts, counts) == 1000 * page_bytes


def test_a_window_gets_what_runs_and_its_share() -> None:
    layouts = kv_layouts([0, 8, 8])
    # 2 sequences: 8 tokens and two cut pages each; three launches of 16 tokens.
    assert running_pages(layouts[1], DEMAND) == 2 * 4 + 3 * 4
    assert counts_for(layouts, 1000, DEMAND) == (1000, 20)
    assert counts_for(layouts, 1000, DEMAND._replace(window_share=0.05)) == (1000, 70)
    assert counts_for(layouts, 10, DEMAND._replace(window_share=0.05)) == (10, 10)


def test_the_longest_window_leads_where_nothing_is_kept_whole() -> None:
    layouts = kv_layouts([8, 32, 8])
    assert leading(layouts).name == "window32"
    assert counts_for(layouts, 1000, DEMAND) == (20, 1000)


@given(
    windows=st.lists(st.sampled_from([0, 4, 12, 40]), min_size=1, max_size=6),
    budget_pages=st.integers(60, 5000),
    share=st.sampled_from([0.0, 0.04, 0.5, 1.0]),
    max_num_seqs=st.integers(1, 40),
)
def test_plans_fit_and_leave_no_room(windows: list[int], budget_pages: int, share: float, max_num_seqs: int) -> None:
    layouts = kv_layouts(windows)
    demand = DEMAND._replace(window_share=share, max_num_seqs=max_num_seqs)
    budget = budget_pages * sum(layout.page_bytes for layout in layouts)
    counts = plan_pages(layouts, budget, demand)
    assert pool_bytes(layouts, counts) <= budget
    more = max(counts) + 1
    assert pool_bytes(layouts, counts_for(layouts, more, demand)) > budget
    # What runs always fits where the leading group has room for it.
    for layout, count in zip(layouts, counts, strict=True):
        assert count >= min(max(counts), running_pages(layout, demand) if layout.window_tokens else max(counts))


@pytest.mark.parametrize(
    ("num_layers", "window_tokens", "num_kv_heads", "head_dim", "full_every", "least"),
    [(36, 128, 8, 64, 2, 1.9), (34, 1024, 4, 256, 6, 5.0)],
    ids=["gpt-oss-120b", "gemma-3-4b"],
)
def test_windows_do_not_take_the_memory_of_whole_prompts(
    num_layers: int, window_tokens: int, num_kv_heads: int, head_dim: int, full_every: int, least: float
) -> None:
    """Tokens per byte against equal counts, in 100 GiB of bf16 pages with the default settings."""
    windows = [0 if layer % full_every == full_every - 1 else window_tokens for layer in range(num_layers)]
    layouts: tuple[GroupLayout, ...] = kv_layouts(windows, torch.bfloat16, 16, num_kv_heads * head_dim // 2)
    demand = PoolDemand(16, 131_072, 2048, 64, window_share=0.04)
    equal = plan_pages(layouts, 100 << 30, demand._replace(window_share=1.0))
    assert plan_pages(layouts, 100 << 30, demand)[0] >= least * equal[0]


def test_a_pool_too_small_for_one_longest_prompt_is_an_error() -> None:
    full = kv_layouts([0])
    page_bytes = full[0].page_bytes
    assert plan_pages(full, 26 * page_bytes, DEMAND) == (25,)
    longer = DEMAND._replace(max_model_len=101)
    with pytest.raises(PoolError, match=r"max_model_len.*101 tokens needs 26 pages of group full.*has 25"):
        plan_pages(full, 26 * page_bytes, longer)
    with pytest.raises(PoolError, match="has 0"):
        plan_pages(full, 10, longer)


def test_a_window_pool_need_not_hold_the_whole_prompt() -> None:
    windowed = kv_layouts([8])
    long = DEMAND._replace(max_model_len=10_000)
    assert longest_prompt_pages(windowed[0], long) == 12  # 8 + 2 * 16 tokens, and two cut pages
    check_pool(windowed, [12], long)
    with pytest.raises(PoolError, match="window8"):
        check_pool(windowed, [11], long)
    check_pool(windowed, [3], DEMAND._replace(max_model_len=12))


def test_budget_of_a_cpu_is_what_was_configured() -> None:
    assert pool_budget(torch.device("cpu"), 0.9, 123456) == 123456
