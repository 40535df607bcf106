"""The benchmark of what a hit saves: it runs for every family, and refuses to time a hit that answers otherwise."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from benchmarks.bench_families import QUICK_NEW, QUICK_SHARED, Bench, Saving, measure, weight_bytes
from benchmarks.family_configs import EXPERTS, FAMILIES
from benchmarks.paged_model import PagedTokens, RandomTensors
from kernels.grouped_linear import dequantised
from session.words import GroupKind
from tests.examples import usual

CPU = torch.device("cpu")
STATES = ("short-convs", "mamba2", "gated-delta")


# One of each form of pages and states.
USUAL = ("windows-sinks", "short-convs", "mamba2", "gated-delta-fp8", "channel-decays", "chosen-latents")


@pytest.mark.parametrize("name", usual(FAMILIES, *USUAL))
def test_every_family_is_measured(name: str) -> None:
    savings = measure([name], CPU, quick=True)
    wanted = [(name, shared, new) for shared in QUICK_SHARED for new in QUICK_NEW]
    assert [saving[:3] for saving in savings] == wanted
    assert all(saving.cold_ms > 0 and saving.hit_ms > 0 for saving in savings)


def damaged(monkeypatch: pytest.MonkeyPatch, name: str, group: int, page: int, other: int) -> Bench:
    """Before each launch behind the prefix, one page of a group has another one's bytes."""
    bench = Bench(name, CPU, quick=True)
    launch = Bench._launch

    def damaging(self: Bench, sequence: PagedTokens, first: int, launches: Sequence[tuple[int, int]]) -> None:
        if first:
            pages = self.model.pages
            pages.write_pages(group, [page], pages.read_pages(group, [other]))
        launch(self, sequence, first, launches)

    monkeypatch.setattr(Bench, "_launch", damaging)
    return bench


def test_a_hit_over_a_wrong_page_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = damaged(monkeypatch, "experts", 0, 1, 30)
    with pytest.raises(AssertionError, match="experts: a hit's logits differ"):
        bench.savings(QUICK_SHARED[0], QUICK_NEW[0])


@pytest.mark.parametrize("name", STATES)
def test_a_hit_from_a_wrong_snapshot_is_not_timed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A sequence's working slot is its first, its snapshot the third: the state behind all tokens is not its."""
    bench = damaged(monkeypatch, name, 1, 3, 1)
    with pytest.raises(AssertionError, match=f"{name}: a hit's logits differ"):
        bench.savings(QUICK_SHARED[0], QUICK_NEW[0])


def test_a_launch_reads_its_projections_and_the_experts_that_its_tokens_choose() -> None:
    """8 experts of 3 x 32 x 64 in each of 3 layers, of which a token chooses 2."""
    model = Bench("experts", CPU, quick=True).model.model
    projections, experts = sum(linear.weight.nbytes for linear in model.linears()), 3 * 8 * 3 * 32 * 64 * 4
    assert weight_bytes(model, 1) == pytest.approx(projections + experts * 2 / 8)
    assert weight_bytes(model, 2) == pytest.approx(projections + experts * (1 - 0.75**2))
    assert weight_bytes(model, 512) == pytest.approx(projections + experts)
    values = experts / 4
    assert weight_bytes(model, 512, "fp8") == pytest.approx(projections + values * (1 + 4 / 128**2))
    assert weight_bytes(model, 512, "mxfp4") == pytest.approx(projections + values * 17 / 32)


@pytest.mark.parametrize("weights", ["fp8", "mxfp4"])
def test_random_experts_in_a_stored_format_have_the_deviation_of_plain_ones(weights: str) -> None:
    source = RandomTensors(torch.Generator().manual_seed(1), torch.float32, EXPERTS[weights])
    made = dequantised(source.take_experts([["gate", "up"]] * 4, 128, 512), torch.float32)
    assert made.shape == (4, 256, 512)
    # Powers of two come within a half of it.
    assert 0.7 < made.std().item() * 512**0.5 < 1.42 and abs(made.mean().item() / made.std().item()) < 0.02


def test_what_is_possible_is_bound_by_tokens_and_by_weights() -> None:
    saving = Saving("experts", 4096, 512, 100.0, 20.0, weights_ms=5.0)
    assert (saving.saved, saving.of_tokens, saving.of_possible) == pytest.approx((0.8, 0.9, 0.9))
    assert saving._replace(weights_ms=16.0).of_possible == pytest.approx(0.8 / 0.84)


def test_a_state_begins_where_a_snapshot_is() -> None:
    model = Bench("short-convs", CPU, quick=True).model
    assert model.page_tokens == 64 and [spec.kind for spec in model.pages.specs()] == [GroupKind.FULL, GroupKind.STATE]
    sequence = model.sequence(200, snapshots=(64,))
    model.begin(sequence, 64)
    assert [(slot.group, slot.boundary_tokens) for slot in sequence.restore] == [(1, 64)]
    with pytest.raises(ValueError, match="no snapshot at 128"):
        model.begin(sequence, 128)
