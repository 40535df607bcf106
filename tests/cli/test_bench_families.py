"""The benchmark of what a hit saves: it runs for every family, and refuses to time a hit that answers otherwise."""

from __future__ import annotations

import pytest
import torch

from benchmarks.bench_families import FAMILIES, QUICK_NEW, QUICK_SHARED, Bench, measure

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", list(FAMILIES))
def test_every_family_is_measured(name: str) -> None:
    savings = measure([name], CPU, quick=True)
    wanted = [(name, shared, new) for shared in QUICK_SHARED for new in QUICK_NEW]
    assert [saving[:3] for saving in savings] == wanted
    assert all(saving.cold_ms > 0 and saving.hit_ms > 0 for saving in savings)


def test_a_hit_over_a_wrong_page_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench("experts", CPU, quick=True)
    run = Bench._run

    def damaging(self: Bench, sequence: object, first: int) -> None:
        if first:
            pages = self.model.pages
            pages.write_pages(0, [1], pages.read_pages(0, [30]))
        run(self, sequence, first)  # type: ignore[arg-type]

    monkeypatch.setattr(Bench, "_run", damaging)
    with pytest.raises(AssertionError, match="experts: a hit's logits differ"):
        bench.savings(QUICK_SHARED[0], QUICK_NEW[0])
