"""The GPU benchmark times nothing that is wrong, and a peer that cannot run does not end it."""

from dataclasses import replace

import pytest
import torch

from benchmarks.bench_gpu import measure
from benchmarks.gpu_attention import attention_tflop
from benchmarks.gpu_layers import in_a_model
from benchmarks.gpu_timer import in_turns
from benchmarks.measurement import OUT_TOLERANCE, Measurement, Peer, Work, row_error
from kernels.backend import Backend
from tests.kernels.target import Target


def fails() -> None:
    raise RuntimeError("no such kernel\nand much detail")


@pytest.mark.parametrize("error", [0.5, float("inf"), float("nan")])
def test_a_wrong_result_gets_no_figure(error: float) -> None:
    wrong = Measurement("op", "case", 1.0, fails, lambda: error, tolerance=0.4)
    row = measure(wrong, lambda works: pytest.fail("timed"))
    assert row.figure is None and row.microseconds is None and row.peers == {}


def test_figures_are_amount_over_time() -> None:
    peers = (Peer("half", dict, 1.0), Peer("broken", fails, 1.0))
    right = Measurement("op", "case", 2.0, list, lambda: 0.0, peers=peers)

    def captured(work: Work) -> float:
        if work is fails:
            fails()
        return 500.0

    row = measure(right, lambda works: in_turns(works, captured, float, 3))
    assert row.figure == 4000.0
    assert row.peers == {"half": 2000.0, "broken": "no such kernel"}
    with pytest.raises(RuntimeError, match="op case: no such kernel"):
        measure(replace(right, run=fails), lambda works: in_turns(works, captured, float, 3))


def test_a_model_s_layers_run_one_behind_the_other() -> None:
    """Each layer, and each layer's peer, once and in order; one that is wrong spoils all."""
    ran: list[str] = []
    errors = [0.0] * 5
    made = iter(range(5))

    def make() -> list[Measurement]:
        layer = next(made)
        peer = Peer("peer", lambda: ran.append(f"peer {layer}"), 3.0)
        own = Measurement("op", "case", 3.0, lambda: ran.append(f"own {layer}"), lambda: errors[layer], peers=(peer,))
        return [own]

    (layers,) = in_a_model(make, 5)
    layers.run()
    layers.peers[0].run()
    assert ran == [f"own {layer}" for layer in range(5)] + [f"peer {layer}" for layer in range(5)]
    assert layers.case == "case, 5 layers"
    assert layers.amount == layers.peers[0].amount == 15.0
    assert layers.error() == 0.0
    errors[-1] = 0.5
    assert layers.error() == 0.5


def test_what_is_done_besides_is_taken_off() -> None:
    own, peer, beside = list, tuple, dict
    takes: dict[object, float | str] = {own: 25.0, peer: 35.0, beside: 15.0}
    both = Measurement("op", "case", 3.0, own, lambda: 0.0, peers=(Peer("peer", peer, 3.0),), beside=beside)
    row = measure(both, lambda works: [takes[work] for work in works])
    assert (row.microseconds, row.figure, row.peers) == (10.0, 3e5, {"peer": 1.5e5})
    takes[peer] = "no such library"
    assert measure(both, lambda works: [takes[work] for work in works]).peers == {"peer": "no such library"}
    takes[beside] = "out of memory"
    with pytest.raises(RuntimeError, match="op case, what is beside it: out of memory"):
        measure(both, lambda works: [takes[work] for work in works])


def test_what_is_compared_is_sampled_in_turns() -> None:
    """A drift of the clock hits all alike: every second round is in reverse."""
    sampled: list[str] = []

    def sample(name: str) -> float:
        sampled.append(name)
        return float(len(sampled))

    works: list[Work] = [list, dict, tuple]
    names = {list: "a", dict: "b", tuple: "c"}
    assert in_turns(works, lambda work: names[work], sample, 4) == [6.5, 6.5, 6.5]  # type: ignore[index]
    assert "".join(sampled) == "abccbaabccba"


@pytest.mark.parametrize("size", [1.0, 0.0094])
def test_the_gate_is_relative_to_the_answer(size: float) -> None:
    """An attention's rows at 32,768 keys are 0.0094 in root mean square: zeros must fail there as anywhere."""
    wanted = size * torch.randn(64, 32, 128, generator=torch.Generator().manual_seed(0))
    assert row_error(wanted.bfloat16(), wanted) < OUT_TOLERANCE / 4
    assert row_error(torch.zeros_like(wanted), wanted) == pytest.approx(1.0)
    assert row_error(0.97 * wanted, wanted) > OUT_TOLERANCE
    one_wrong = wanted.clone()
    one_wrong[5, 3] = wanted[5, 4]
    assert row_error(one_wrong, wanted) > OUT_TOLERANCE
    one_wrong[5, 3, 0] = float("nan")
    assert row_error(one_wrong, wanted) == float("inf")


def test_plain_readers_read_everything(target: Target) -> None:
    if target.backend is Backend.REFERENCE:
        pytest.skip("a Triton kernel alone")
    from benchmarks.gpu_reader import readers

    source = torch.arange(5 * 8192, dtype=torch.float32, device=target.device) % 7
    sums = [read().sum().item() for read in readers(source, 3)]
    assert sums and set(sums) == {source.sum().item()}


def test_the_work_of_a_causal_square() -> None:
    """One sequence of two tokens: three visible pairs, two products, two operations each."""
    assert attention_tflop(1, 0, 2) == pytest.approx(4e-12 * 3 * 32 * 128)
    assert attention_tflop(1, 1, 1) == pytest.approx(4e-12 * 2 * 32 * 128)
