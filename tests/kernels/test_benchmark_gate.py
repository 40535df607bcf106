"""The GPU benchmark times nothing that is wrong, and a peer that cannot run does not end it."""

import pytest

from benchmarks.bench_gpu import measure
from benchmarks.gpu_attention import attention_tflop
from benchmarks.measurement import Measurement, Peer


def fails() -> None:
    raise RuntimeError("no such kernel\nand much detail")


@pytest.mark.parametrize("error", [0.5, float("inf"), float("nan")])
def test_a_wrong_result_gets_no_figure(error: float) -> None:
    wrong = Measurement("op", "case", "GB/s", 1.0, fails, lambda: error, tolerance=0.4)
    row = measure(wrong, lambda work: pytest.fail("timed"))
    assert row.figure is None and row.microseconds is None and row.peers == {}


def test_figures_are_amount_over_time() -> None:
    peers = (Peer("half", dict, 1.0), Peer("broken", fails, 1.0))
    right = Measurement("op", "case", "GB/s", 2.0, list, lambda: 0.0, peers=peers)

    def clock(work: object) -> float:
        if work is fails:
            fails()
        return 500.0

    row = measure(right, clock)
    assert row.figure == 4000.0
    assert row.peers == {"half": 2000.0, "broken": "no such kernel"}


def test_the_work_of_a_causal_square() -> None:
    """One sequence of two tokens: three visible pairs, two products, two operations each."""
    assert attention_tflop(1, 0, 2) == pytest.approx(4e-12 * 3 * 32 * 128)
    assert attention_tflop(1, 1, 1) == pytest.approx(4e-12 * 2 * 32 * 128)
