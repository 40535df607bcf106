"""How one budget becomes pages of several groups, and pools that a longest prompt does not fit into."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from session.words import GroupKind
from tests.worker_service.kv_layouts import kv_layouts
from tests.worker_service.published_mamba2 import PUBLISHED_MAMBA2
from tests.worker_service.published_states import PUBLISHED_STATES
from worker_service.config import WorkerConfig
from worker_service.core.errors import PoolError
from worker_service.gpu.group_layout import GroupLayout, PageTensor
from worker_service.gpu.pool_plan import (
    MIN_SNAPSHOTS,
    PoolDemand,
    check_interval,
    check_pool,
    counts_for,
    leading,
    longest_prompt_pages,
    num_snapshots,
    plan_pages,
    pool_budget,
    pool_bytes,
    running_pages,
)
from worker_service.model.config import parse_model_spec
from worker_service.model.page_layouts import page_layouts

DEMAND = PoolDemand(
    page_tokens=4, max_model_len=100, max_chunk_tokens=16, max_num_seqs=2, window_share=0.0, state_share=0.5
)


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
    ("num_layers", "window_tokens", "num_kv_heads", "head_dim", "full_every", "settings", "gib", "least"),
    [
        (36, 128, 8, 64, 2, {}, 100, 1.9),
        (34, 1024, 4, 256, 6, {}, 110, 5.0),
        (48, 1024, 8, 256, 6, {"max_num_seqs": 16, "window_share": 0.01}, 95, 5.2),
        (62, 1024, 16, 128, 6, {"max_num_seqs": 16, "window_share": 0.01}, 75, 5.1),
    ],
    ids=["gpt-oss-120b", "gemma-3-4b", "gemma-3-12b", "gemma-3-27b"],
)
def test_windows_do_not_take_the_memory_of_whole_prompts(
    num_layers: int, window_tokens: int, num_kv_heads: int, head_dim: int, full_every: int, settings: dict[str, Any],
    gib: int, least: float,
) -> None:  # fmt: skip
    """Tokens per byte against equal counts, in GiB of bf16 pages, with the default settings or with others."""
    windows = [0 if layer % full_every == full_every - 1 else window_tokens for layer in range(num_layers)]
    layouts: tuple[GroupLayout, ...] = kv_layouts(windows, torch.bfloat16, 16, num_kv_heads * head_dim // 2)
    demand = PoolDemand(16, 131_072, 2048, 64, window_share=0.04, state_share=0.5)._replace(**settings)
    equal = plan_pages(layouts, gib << 30, demand._replace(window_share=1.0))
    assert plan_pages(layouts, gib << 30, demand)[0] >= least * equal[0]


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


def with_states(*sizes: int) -> tuple[GroupLayout, ...]:
    """A group of whole prompts, whose page takes 512 bytes, and a group of states for each size in bytes."""
    states = (
        GroupLayout(f"state-{size}", GroupKind.STATE, (at + 1,), (PageTensor(1, (size // 4,), torch.float32),))
        for at, size in enumerate(sizes)
    )
    return (*kv_layouts([0]), *states)


def test_states_get_a_slot_for_each_sequence_and_a_share_of_memory_for_snapshots() -> None:
    layouts = with_states(2048)
    assert layouts[0].page_bytes == 512
    # 1,000 pages of 512 bytes, half of that in snapshots of 2,048.
    assert num_snapshots(layouts, 1000, DEMAND) == 125
    assert counts_for(layouts, 1000, DEMAND) == (1000, 127)
    assert counts_for(layouts, 1000, DEMAND._replace(state_share=0.0)) == (1000, 2)
    # Never more than one for each page.
    assert counts_for(with_states(64), 1000, DEMAND) == (1000, 1002)


LARGE = {
    "Qwen3-Next": (PUBLISHED_STATES["Qwen/Qwen3-Next-80B-A3B-Instruct"], 73.7),
    "Bamba": (PUBLISHED_MAMBA2["ibm-fms/Bamba-9B"], 117.4),
}


def large(name: str) -> tuple[tuple[GroupLayout, ...], PoolDemand]:
    """The shapes of a model with large snapshots, in bf16, and the default settings."""
    fields, snapshot_mib = LARGE[name]
    spec = parse_model_spec(fields)
    layouts = page_layouts(spec, torch.bfloat16, spec.page_tokens)
    assert layouts[1].page_bytes / (1 << 20) == pytest.approx(snapshot_mib, abs=0.1)
    config = WorkerConfig(model="any")
    demand = PoolDemand(
        spec.page_tokens, 32_768, config.token_budget, config.max_num_seqs, config.window_share, config.state_share
    )
    return layouts, demand


@pytest.mark.parametrize(
    ("name", "budget_gib", "snapshots"),
    [("Qwen3-Next", 20, 70), ("Qwen3-Next", 60, 256), ("Bamba", 30, 65), ("Bamba", 100, 269)],
)
def test_large_snapshots_get_half_of_the_pages_memory_by_default(name: str, budget_gib: int, snapshots: int) -> None:
    """As docs/operations.md says of state_share: `snapshots` beside the slots of max_num_seqs running sequences."""
    layouts, demand = large(name)
    pages, slots = plan_pages(layouts, budget_gib << 30, demand)
    assert slots - demand.max_num_seqs == snapshots == num_snapshots(layouts, pages, demand)
    share_bytes = pages * layouts[0].page_bytes // 2
    assert snapshots * layouts[1].page_bytes <= share_bytes < (snapshots + 1) * layouts[1].page_bytes
    twice = demand._replace(state_share=2 * demand.state_share)
    assert plan_pages(layouts, budget_gib << 30, twice)[1] > slots


@pytest.mark.parametrize(("name", "budget_gib"), [("Qwen3-Next", 6.2), ("Bamba", 9)])
def test_a_small_pool_keeps_a_few_snapshots_all_the_same(name: str, budget_gib: float) -> None:
    layouts, demand = large(name)
    budget_bytes = int(budget_gib * (1 << 30))
    pages, slots = plan_pages(layouts, budget_bytes, demand)
    assert slots == demand.max_num_seqs + MIN_SNAPSHOTS
    assert pages * layouts[0].page_bytes * demand.state_share < MIN_SNAPSHOTS * layouts[1].page_bytes
    assert plan_pages(layouts, budget_bytes, demand._replace(state_share=0.0))[1] == demand.max_num_seqs


@pytest.mark.parametrize(("name", "budget_gib", "fits"), [("Qwen3-Next", 5, 40), ("Bamba", 8, 55)])
def test_states_that_take_the_whole_budget_are_an_error_that_says_what_to_set(
    name: str, budget_gib: int, fits: int
) -> None:
    layouts, demand = large(name)
    with pytest.raises(PoolError, match=r"max_num_seqs: the states of 64 running .* and 8 snapshots.*set it lower"):
        plan_pages(layouts, budget_gib << 30, demand)
    assert plan_pages(layouts, budget_gib << 30, demand._replace(max_num_seqs=fits))[1] >= fits + MIN_SNAPSHOTS


def test_several_groups_of_states_share_the_memory() -> None:
    """A snapshot is one slot in each of them."""
    assert counts_for(with_states(1024, 3072), 1000, DEMAND) == (1000, 64, 64)


@given(
    sizes=st.lists(st.sampled_from([64, 1024, 40_000]), min_size=1, max_size=3),
    budget_bytes=st.integers(2_000_000, 20_000_000),
    share=st.sampled_from([0.0, 0.1, 0.5, 2.0]),
    max_num_seqs=st.integers(2, 4),
)
def test_plans_with_states_fit_and_leave_no_room(
    sizes: list[int], budget_bytes: int, share: float, max_num_seqs: int
) -> None:
    layouts = with_states(*sizes)
    demand = DEMAND._replace(state_share=share, max_num_seqs=max_num_seqs)
    counts = plan_pages(layouts, budget_bytes, demand)
    assert pool_bytes(layouts, counts) <= budget_bytes
    assert pool_bytes(layouts, counts_for(layouts, counts[0] + 1, demand)) > budget_bytes
    assert min(counts[1:]) >= max_num_seqs


def test_a_pool_with_fewer_states_than_sequences_is_an_error() -> None:
    layouts = with_states(2048)
    check_pool(layouts, (25, 2), DEMAND)
    with pytest.raises(PoolError, match=r"max_num_seqs: 2 sequences need a slot of group state-2048 each.*has 1"):
        check_pool(layouts, (25, 1), DEMAND)
    with pytest.raises(PoolError, match=r"state_share: group state-2048 has 1 slot, and needs 2"):
        check_pool(layouts, (25, 1), DEMAND._replace(max_num_seqs=1))
    # The states of 100 sequences alone are beyond the budget.
    with pytest.raises(PoolError, match=r"max_num_seqs: the states of 100 running sequences and 8 snapshots"):
        plan_pages(layouts, 100_000, DEMAND._replace(max_num_seqs=100))
    # They fit, and the longest prompt does not.
    with pytest.raises(PoolError, match=r"max_model_len.*the budget is 240000 bytes.*state-2048 2048"):
        plan_pages(layouts, 240_000, DEMAND._replace(max_num_seqs=100, max_model_len=1000))


def test_the_interval_of_snapshots_is_a_boundary_of_pages() -> None:
    layouts = with_states(2048)
    assert check_interval(layouts, 512, 64) == 512
    assert check_interval(layouts, 0, 64) == 0
    with pytest.raises(PoolError, match=r"state_interval_tokens: 512 is no multiple of page_tokens = 48"):
        check_interval(layouts, 512, 48)
    assert check_interval(kv_layouts([0]), 512, 48) == 0, "a model without states has none"


def test_budget_of_a_cpu_is_what_was_configured() -> None:
    assert pool_budget(torch.device("cpu"), 0.9, 123456) == 123456
