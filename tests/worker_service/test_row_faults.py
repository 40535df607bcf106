"""A batch whose rows cannot all be computed: the culprits fail, the others get what they would get without them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.worker_service.scheduler_machine import full_group
from tests.worker_service.serial_runner import SerialRunner
from tests.worker_service.test_batch import row, sequence
from worker_service.core.batch import Batch, build_batch
from worker_service.core.batch_part import part_of
from worker_service.core.errors import DeviceLost
from worker_service.core.launch_plan import Row
from worker_service.core.runner_port import LaunchTokens
from worker_service.core.sampling_params import (
    MAX_FP32,
    MAX_INT32,
    MAX_LOGPROBS,
    MAX_PENALTY,
    MIN_PENALTY,
    SamplingParams,
    TokenLogprobs,
)
from worker_service.launch.device_runner import DeviceRunner
from worker_service.launch.row_faults import MAX_RUNS, RowResults, run_in_parts
from worker_service.model.sampling_arrays import sampling_arrays

GROUPS = (full_group(1000),)


def batch_of(num_decode: int, chunks: int) -> Batch:
    """Rows whose first page is their number plus 1; every third chunk does not reach its sequence's end."""
    decode = [row(5 + at, 1, first_page=10 * at + 1) for at in range(num_decode)]
    rows = decode + [row(at % 3, 6, first_page=1000 + 10 * at, more=int(at % 3 == 2)) for at in range(chunks)]
    return build_batch(rows, num_decode, GROUPS, 4)


def answer(batch: Batch) -> LaunchTokens:
    """A row's token is its first page, so a part that names other pages gives other tokens."""
    pages = [batch.block_tables[0][entry.row * batch.table_widths[0]] for entry in batch.sampled]
    return LaunchTokens(tuple(pages), tuple(TokenLogprobs(float(page), ()) for page in pages))


def run_rows(run: Callable[[Batch], LaunchTokens], batch: Batch, *, may_repeat: bool = True) -> RowResults | None:
    """As the launcher does: whole, and in parts when that fails. None when it does not fail."""
    try:
        run(batch)
    except DeviceLost:
        raise
    except Exception as error:
        return run_in_parts(run, batch, error, may_repeat=may_repeat)
    return None


class Faulty:
    """Fails each batch that reads one of these first pages."""

    def __init__(self, bad_pages: set[int]) -> None:
        self.bad_pages = bad_pages
        self.num_runs = 0

    def run(self, batch: Batch) -> LaunchTokens:
        self.num_runs += 1
        firsts = set(batch.block_tables[0][:: batch.table_widths[0]])
        if firsts & self.bad_pages:
            raise RuntimeError("a bad row")
        return answer(batch)


@given(st.integers(0, 12), st.integers(0, 8), st.sets(st.integers(0, 19), max_size=2))
def test_only_the_culprits_fail(num_decode: int, chunks: int, chosen: set[int]) -> None:
    batch = batch_of(num_decode, chunks)
    bad = {at for at in chosen if at < batch.num_seqs}
    firsts = batch.block_tables[0][:: batch.table_widths[0]]
    runner = Faulty({firsts[at] for at in bad})
    results = run_rows(runner.run, batch)
    assert (results is not None) == bool(bad)
    if results is None:
        return
    assert set(results.errors) == bad
    whole = answer(batch)
    for at, entry in enumerate(batch.sampled):
        if entry.row not in bad:
            assert results.token_ids[at] == whole.token_ids[at]
            assert results.logprobs[at] == whole.logprobs[at]


@pytest.mark.parametrize(("num_bad", "most"), [(1, 13), (2, 25), (64, MAX_RUNS)])
def test_the_work_is_bounded(num_bad: int, most: int) -> None:
    batch = batch_of(64, 0)
    runner = Faulty(set(batch.block_tables[0][:: batch.table_widths[0]][: 64 : 64 // num_bad]))
    results = run_rows(runner.run, batch)
    assert results is not None
    assert len(results.errors) == num_bad
    assert runner.num_runs <= most


def test_rows_that_cannot_be_repeated_fail_together() -> None:
    batch = batch_of(4, 0)
    runner = Faulty({1})
    results = run_rows(runner.run, batch, may_repeat=False)
    assert results is not None
    assert set(results.errors) == {0, 1, 2, 3}
    assert runner.num_runs == 1


@given(st.data())
def test_a_part_is_the_batch_of_these_rows(data: st.DataObject) -> None:
    num_decode, chunks = data.draw(st.integers(0, 5)), data.draw(st.integers(1, 5))
    first = data.draw(st.integers(0, num_decode + chunks - 1))
    end = data.draw(st.integers(first + 1, num_decode + chunks))
    rows = [row(5 + at, 1, first_page=10 * at + 1) for at in range(num_decode)]
    rows += [row(at, 6, first_page=1000 + 10 * at, more=at % 2) for at in range(chunks)]
    part = part_of(build_batch(rows, num_decode, GROUPS, 4), first, end)
    built = build_batch(rows[first:end], max(0, min(num_decode, end) - first), GROUPS, 4)
    for name in Batch.__slots__:
        if name not in ("block_tables", "table_widths"):  # a part keeps the width of the whole
            assert getattr(part, name) == getattr(built, name), name
    width, narrow = part.table_widths[0], built.table_widths[0]
    for at in range(part.num_seqs):
        mine = part.block_tables[0][at * width : (at + 1) * width]
        assert mine[:narrow] == built.block_tables[0][at * narrow : (at + 1) * narrow]
        assert not any(mine[narrow:])


@given(
    # From integers: st.floats refuses to work where another test made the processor flush subnormals to zero.
    temperature=st.sampled_from([0.0, 1e-40, 1e-3, 0.7, 1.0, 2.0, 1e30, MAX_FP32]),
    top_k=st.sampled_from([0, 1, MAX_INT32]),
    top_p=st.integers(1, 1 << 24).map(lambda part: part / (1 << 24)),
    min_p=st.integers(0, 1 << 24).map(lambda part: part / (1 << 24)),
    penalty=st.sampled_from([1.0, MIN_PENALTY, MAX_PENALTY]),
    seed=st.sampled_from([0, 1, (1 << 64) - 1]),
    logprobs=st.sampled_from([None, 0, MAX_LOGPROBS]),
)
def test_whatever_passes_the_checks_fits_into_a_launch(
    temperature: float, top_k: int, top_p: float, min_p: float, penalty: float, seed: int, logprobs: int | None
) -> None:
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=penalty,
        seed=seed,
        logprobs=logprobs,
    )
    params.validate()
    batch = build_batch([Row(sequence([1, 2, 3], [1], sampling=params), 0, 3)], 0, GROUPS, 4)
    assert len(sampling_arrays(batch.sampled)[0]) == 1


class Device(DeviceRunner):
    """A CUDA device, as far as the runner sees it."""

    def __init__(self, error: Exception, *, is_alive: bool) -> None:
        super().__init__(self, torch.device("cpu"))  # type: ignore[arg-type]
        self._runner = SerialRunner(_Raising(error).run)
        self.is_alive = is_alive
        self.num_emptied = 0

    def run(self, batch: Batch) -> LaunchTokens:
        return self.submit(batch).wait().tokens

    def _synchronize(self) -> None:
        if not self.is_alive:
            raise RuntimeError("CUDA error: device-side assert triggered\nmore")

    def _empty_cache(self) -> None:
        self.num_emptied += 1


class _Raising:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def run(self, batch: Batch) -> LaunchTokens:
        raise self.error


def test_an_error_after_which_the_device_is_silent_is_its_loss() -> None:
    device = Device(RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"), is_alive=False)
    with pytest.raises(DeviceLost, match=r"CUBLAS.*device-side assert triggered$"):
        device.submit(batch_of(1, 0))
    with pytest.raises(DeviceLost):
        run_rows(device.run, batch_of(4, 0))


def test_an_error_of_a_living_device_is_the_launches_own() -> None:
    with pytest.raises(ValueError, match="odd"):
        Device(ValueError("odd"), is_alive=True).submit(batch_of(1, 0))


def test_what_did_not_fit_into_memory_is_given_back_and_run_in_halves() -> None:
    device = Device(torch.OutOfMemoryError("too large"), is_alive=True)

    class Small:
        def run(self, batch: Batch) -> LaunchTokens:
            if batch.num_seqs > 2:
                raise torch.OutOfMemoryError("too large")
            return answer(batch)

    device._runner = SerialRunner(Small().run)
    batch = batch_of(8, 0)
    results = run_rows(device.run, batch)
    assert results is not None
    assert not results.errors
    assert results.token_ids == answer(batch).token_ids
    assert device.num_emptied == 3
