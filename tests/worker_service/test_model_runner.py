"""The runner around the model: one upload, padded launches, sampled rows and their log-probabilities."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from tests.worker_service.model_kit import CPU, VOCAB, Bench, PagedTokens, Part, make_reference, random_tokens
from worker_service.core.errors import ModelError
from worker_service.model import staging
from worker_service.model.device import pick_device, pick_dtype
from worker_service.model.runner import Runner, RunningLaunch
from worker_service.model.staging import Download, FixedUpload, HostArray, HostBuffer, Upload, put


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    make_reference("llama", folder)
    return folder


@pytest.fixture
def bench(folder: Path) -> Bench:
    return Bench(folder)


def generate(bench: Bench, sequence: PagedTokens, count: int) -> list[int]:
    """One token at a time behind the prompt."""
    first = 0
    for _ in range(count):
        end = len(sequence.tokens)
        sequence.tokens.extend(bench.run(Part(sequence, first, end)).token_ids)
        first = end
    return list(sequence.tokens[-count:])


def test_upload_keeps_every_array_apart() -> None:
    arrays: list[HostArray] = [
        array("i", [1, -2, 3]),
        array("q"),
        array("q", [2**40, -1]),
        array("f", [0.5, -1.25]),
        array("i", range(100_000)),  # beyond the first buffer
    ]
    upload = Upload(CPU)
    for _ in range(2):
        tensors = upload.send(arrays)
        assert [tensor.tolist() for tensor in tensors] == [list(values) for values in arrays]
    assert [tensor.dtype for tensor in tensors[1:4]] == [torch.int64, torch.int64, torch.float32]
    assert Download(CPU).start(tensors[0]).wait().tolist() == [1, -2, 3]


def test_fixed_arrays_stay_where_they_are_and_forget_the_launch_before() -> None:
    padding: list[HostArray] = [array("i", [0, 0, 0]), array("q", [-1] * 4), array("f", [1.0])]
    upload = FixedUpload(CPU, padding, 64)
    assert [tensor.tolist() for tensor in upload.tensors] == [[0, 0, 0], [-1] * 4, [1.0]]
    ids, slots, scales = upload.begin()
    put(array("i", [5, 6, 7]), ids)
    put(array("q", [2**40]), slots, 2)
    put(array("f", [0.5]), scales)
    (behind,) = upload.send([array("i", range(16))])
    assert behind.tolist() == list(range(16))
    assert [tensor.tolist() for tensor in upload.tensors] == [[5, 6, 7], [-1, -1, 2**40, -1], [0.5]]
    ids, slots, _ = upload.begin()
    put(array("i", [8]), ids, 1)
    with pytest.raises(ValueError):
        put(array("q", [1, 2]), slots, 3)
    assert upload.send([]) == []
    assert [tensor.tolist() for tensor in upload.tensors] == [[0, 8, 0], [-1] * 4, [1.0]]


class LateBuffer(HostBuffer):
    """Whose copies take place when somebody waits for them, in the order in which they were started."""

    started: ClassVar[list[Callable[[], object]]] = []

    def __init__(self, num_bytes: int) -> None:
        super().__init__(num_bytes, CPU)
        self._last = 0

    def copy_to(self, on_device: torch.Tensor, end: int) -> None:
        self.started.append(lambda: on_device[:end].copy_(self.tensor[:end]))
        self._last = len(self.started)

    def wait(self) -> None:
        for number in range(self._last):
            self.started[number]()
            self.started[number] = lambda: None


def test_copies_that_take_place_late_bring_what_their_own_launch_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two are under way, each followed by what reads it, as a graph is; the one before them has not been read yet."""
    monkeypatch.setattr(staging, "_host_buffers", lambda num_bytes, device: [LateBuffer(num_bytes) for _ in range(2)])
    monkeypatch.setattr(staging, "_device_buffer", lambda like, device: torch.empty_like(like.tensor))
    monkeypatch.setattr(LateBuffer, "started", [])
    upload = FixedUpload(CPU, [array("i", [0] * 5), array("q", [-1] * 3)], 256)
    read, wanted = [], []
    for number in range(40):
        ids, slots = upload.begin()
        values = array("i", range(number, number + number * 7 % 6))
        put(values, ids)
        put(array("q", [number]), slots, number % 3)
        (behind,) = upload.send([array("i", range(number % 5 + 1))])
        fixed = [[*values, *[0] * (5 - len(values))], [number if at == number % 3 else -1 for at in range(3)]]
        wanted.append([*fixed, list(range(number % 5 + 1))])
        LateBuffer.started.append(lambda b=behind: read.append([t.tolist() for t in (*upload.tensors, b)]))
    assert len(read) == 40 - 3
    for start in LateBuffer.started:
        start()
    assert read == wanted


def test_a_chunk_that_is_not_the_last_fills_its_pages_and_samples_nothing(bench: Bench) -> None:
    sequence = bench.sequence(random_tokens(40, 1), [1, 2, 3])
    whole = bench.sequence(sequence.tokens, [4, 5, 6])
    result = bench.run(Part(sequence, 0, 16))
    assert result.token_ids == ()
    assert result.logprobs == ()
    assert bench.run(Part(sequence, 16, 40)).token_ids == bench.run(Part(whole, 0, 40)).token_ids
    assert torch.allclose(*(bench.pages.layer_pages(1).k[page] for page in (1, 4)), atol=1e-5)


def test_greedy_tokens_are_the_logits_best(bench: Bench) -> None:
    tokens = random_tokens(20, 2)
    wanted = bench.all_logits(Part(bench.sequence(tokens, [1, 2]), 0, 20))[-1].argmax()
    assert bench.run(Part(bench.sequence(tokens, [3, 4]), 0, 20)).token_ids == (int(wanted),)


def test_decoding_from_a_cached_prefix_repeats_the_cold_run(bench: Bench) -> None:
    prompt = random_tokens(40, 3)
    cold = generate(bench, bench.sequence(prompt, [1, 2, 3, 4, 5]), 20)
    warm = bench.sequence(prompt, [1, 2, 9, 10, 11])
    first = bench.run(Part(warm, 32, 40)).token_ids
    warm.tokens.extend(first)
    assert [*first, *_continue(bench, warm, 40, 19)] == cold


def _continue(bench: Bench, sequence: PagedTokens, first: int, count: int) -> list[int]:
    for _ in range(count):
        end = len(sequence.tokens)
        sequence.tokens.extend(bench.run(Part(sequence, first, end)).token_ids)
        first = end
    return list(sequence.tokens[-count:])


def test_random_tokens_repeat_with_the_seed(bench: Bench) -> None:
    prompt = random_tokens(20, 4)
    runs = [
        generate(bench, bench.sequence(prompt, [1, 2, 3], temperature=1.0, top_p=0.9, seed=seed), 16)
        for seed in (7, 7, 8)
    ]
    assert runs[0] == runs[1] != runs[2]


def test_small_launches_are_padded_without_a_trace(folder: Path) -> None:
    """Padding to a least number of rows must not reach pages, logits or results."""
    plain, padded = Bench(folder), Bench(folder)
    plain.runner._gemm.least_rows, padded.runner._gemm.least_rows = 0, 24
    tokens = random_tokens(19, 5)
    for first, end in ((0, 16), (16, 18), (18, 19)):
        logits = [
            bench.runner.logits(bench.batch(Part(bench.sequence(tokens[:end], [1, 2]), first, end)))
            for bench in (plain, padded)
        ]
        assert logits[0].shape == logits[1].shape == (1, VOCAB)
        assert torch.allclose(*logits, atol=1e-5)
    for layer in range(len(plain.config.layers)):
        for one, other in zip(*(bench.pages.planes(layer) for bench in (plain, padded)), strict=True):
            assert torch.allclose(one, other, atol=1e-5, equal_nan=True)
            assert other[0].count_nonzero() == 0


def test_logprobs_go_to_the_rows_that_asked(bench: Bench) -> None:
    prompts = [random_tokens(length, length) for length in (5, 9, 12, 7)]
    params: list[dict[str, int]] = [{"logprobs": 2}, {}, {"logprobs": 0}, {"logprobs": 5}]
    sequences = [bench.sequence(p, [n + 1], **w) for n, (p, w) in enumerate(zip(prompts, params, strict=True))]
    parts = [Part(sequence, 0, len(sequence.tokens)) for sequence in sequences]
    result = bench.run(*parts)
    wanted = bench.runner.logits(bench.batch(*parts)).log_softmax(-1)
    assert [None if entry is None else len(entry.top) for entry in result.logprobs] == [2, None, 0, 5]
    for place, entry in enumerate(result.logprobs):
        if entry is not None:
            assert entry.sampled == pytest.approx(wanted[place, result.token_ids[place]].item(), abs=1e-5)
            best = wanted[place].sort(descending=True)
            assert [token for token, _ in entry.top] == best.indices[: len(entry.top)].tolist()
            assert [value for _, value in entry.top] == pytest.approx(best.values[: len(entry.top)].tolist(), abs=1e-5)


def test_penalty_sees_prompt_and_answer(bench: Bench) -> None:
    """With a huge penalty no token ever comes twice, nor any of the prompt."""
    prompt = random_tokens(10, 6)
    answer = generate(bench, bench.sequence(prompt, [1, 2, 3, 4], repetition_penalty=1e6), 30)
    assert len(set(answer)) == 30
    assert not set(answer) & set(prompt)


@pytest.mark.parametrize("params", [{}, {"temperature": 0.8, "top_p": 0.9, "seed": 3}], ids=str)
def test_penalties_count_tokens_that_only_the_device_has(bench: Bench, params: dict[str, float]) -> None:
    """Launches queued behind each other give the tokens of launches whose tokens are all counted anew."""
    params = {**params, "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.4}
    prompt = random_tokens(10, 8)
    wanted = generate(bench, bench.sequence(prompt, [1, 2, 3], **params), 25)
    plain = generate(bench, bench.sequence(prompt, [1, 2, 3]), 25)
    assert len(set(wanted)) > len(set(plain))
    assert queued(bench, bench.sequence(prompt, [4, 5, 6], **params), 25) == wanted


def queued(bench: Bench, sequence: PagedTokens, count: int) -> list[int]:
    """Each launch but the first is submitted before the host has the token that it continues from."""
    first, running = 0, []
    for _ in range(count):
        batch = bench.batch(Part(sequence, first, sequence.planned_len), num_decode=min(first, 1))
        running.append(bench.runner.submit(batch))
        first = sequence.counted_len = sequence.planned_len
        sequence.num_pending += 1
        if len(running) == 2:
            _take(sequence, running.pop(0))
    _take(sequence, running.pop())
    return list(sequence.tokens[-count:])


def _take(sequence: PagedTokens, running: RunningLaunch) -> None:
    sequence.tokens.extend(running.wait().tokens.token_ids)
    sequence.num_pending -= 1


def test_batches_of_only_decode_or_only_prefill_rows(bench: Bench) -> None:
    tokens = random_tokens(17, 7)
    sequence = bench.sequence(tokens, [1, 2])
    bench.run(Part(sequence, 0, 16))
    as_decode = bench.all_logits(Part(sequence, 16, 17), num_decode=1)
    as_prefill = bench.all_logits(Part(sequence, 16, 17), num_decode=0)
    assert torch.allclose(as_decode, as_prefill, atol=1e-5)


def test_devices_and_dtypes_are_checked() -> None:
    assert pick_device("cpu") == CPU
    assert pick_dtype("auto", "bfloat16", CPU) is torch.float32
    cuda = torch.device("cuda", 0)
    assert pick_dtype("auto", "float16", cuda) is torch.float16
    assert pick_dtype("auto", "float32", cuda) is torch.bfloat16
    with pytest.raises(ModelError, match="float32"):
        pick_dtype("float32", "bfloat16", cuda)
    with pytest.raises(ModelError, match="int4"):
        pick_dtype("int4", "bfloat16", CPU)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_device_is_told() -> None:
    with pytest.raises(ModelError, match="no CUDA device"):
        pick_device("cuda")
    assert pick_device("auto") == CPU


def test_a_runner_serves_many_batches_with_growing_buffers(bench: Bench) -> None:
    """What one launch uploaded must not leak into the next, larger or smaller one."""
    runner: Runner = bench.runner
    long = bench.sequence(random_tokens(200, 8), range(1, 14))
    short = bench.sequence(random_tokens(3, 9), [20])
    results = [runner.run(bench.batch(Part(s, 0, len(s.tokens)))).token_ids for s in (short, long, short, long)]
    assert results[:2] == results[2:]
