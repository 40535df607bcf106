"""A capture is not ended by the garbage collector."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from kernels.graph_capture import graph_capture


@pytest.fixture
def eager_collector() -> Iterator[None]:
    """The collector looks at all that is new, at nearly every new container."""
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.collect()
    gc.set_threshold(1, 1, 1)
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()


def make_containers() -> list[list[int]]:
    return [[number] for number in range(1000)]


def test_an_eager_collector_frees_cycles_at_once(eager_collector: None) -> None:
    """What the test below stands on."""
    cycle: list[object] = [(gone := threading.Event())]
    freed = weakref.ref(gone)
    cycle.append(cycle)
    del cycle, gone
    make_containers()
    assert freed() is None


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_off_inside_alone(monkeypatch: pytest.MonkeyPatch, enabled: bool) -> None:
    seen = []

    @contextmanager
    def capture(graph: object, **options: object) -> Iterator[None]:
        seen.append((graph, options, gc.isenabled()))
        yield

    monkeypatch.setattr(torch.cuda, "graph", capture)
    was_enabled = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(KeyError), graph_capture("a graph", pool=(0, 1)):  # type: ignore[arg-type]
            raise KeyError
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()
    assert seen == [("a graph", {"pool": (0, 1), "capture_error_mode": "global"}, False)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_graphs_that_nobody_holds_outlive_a_capture(eager_collector: None) -> None:
    values = torch.arange(4.0, device="cuda")
    cycle: list[object] = [(old := torch.cuda.CUDAGraph())]
    with graph_capture(old):
        values.add(1)
    cycle.append(cycle)
    graph = torch.cuda.CUDAGraph()
    with graph_capture(graph):
        # The collector alone can free it now.
        del cycle, old
        containers = make_containers()
        doubled = values + values
    values.add_(len(containers))
    graph.replay()
    assert torch.equal(doubled, values + values)
