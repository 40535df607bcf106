"""A model with recurrent states, fp32 on the CPU: where a state comes from, where it goes, and that it matters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from session.words import GroupKind, SnapshotSlot
from tests.worker_service.model_kit import (
    CPU,
    PAGE,
    Bench,
    PagedTokens,
    Part,
    make_config,
    make_reference,
    random_tokens,
)
from worker_service.core.batch import Batch
from worker_service.gpu.group_layout import PageTensor
from worker_service.model.config import parse_model_spec
from worker_service.model.launch_buckets import GraphLimits
from worker_service.model.launch_graphs import LaunchGraphs
from worker_service.model.page_layouts import page_layouts

LENGTH = 3 * PAGE + 5
STATE = 1


@pytest.fixture(scope="module", params=["lfm2", "lfm2-biases"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    make_reference(request.param, folder)
    return folder


@pytest.fixture
def bench(folder: Path) -> Bench:
    return Bench(folder)


def states_of(bench: Bench) -> torch.Tensor:
    """Returns the bytes of every slot, the reserved one first."""
    layers = [layer for layer, spec in enumerate(bench.config.layers) if bench.pages.layer_pages(layer).group == STATE]
    return torch.stack([bench.pages.layer_pages(layer).planes[0] for layer in layers], dim=1)


def changed(before: torch.Tensor, after: torch.Tensor) -> set[int]:
    same = (before == after) | (before.isnan() & after.isnan())
    return {slot for slot, held in enumerate(same.flatten(1).all(1).tolist()) if not held}


def slot_of(slots: tuple[SnapshotSlot, ...]) -> int:
    return slots[0].slot


@pytest.mark.parametrize("boundary", [1, 2, 3])
def test_a_restored_state_gives_the_bits_of_the_uncut_run(bench: Bench, boundary: int) -> None:
    tokens = random_tokens(LENGTH, 1)
    whole = bench.all_logits(Part(bench.sequence(tokens, [1, 2, 3, 4]), 0, LENGTH))
    hit = bench.sequence(tokens, [*range(1, boundary + 1), *range(20, 24 - boundary)])
    assert torch.equal(bench.all_logits(Part(hit, boundary * PAGE, LENGTH)), whole[boundary * PAGE :])


def test_decode_leaves_its_state_at_the_end_of_a_page(bench: Bench) -> None:
    """A second turn goes on from the rolling snapshot, whose page decoding filled."""
    tokens = random_tokens(2 * PAGE + 7, 2)
    first = bench.sequence(tokens, [1, 2, 3])
    first.leave = ()
    bench.all_logits(Part(first, 0, PAGE - 3))
    for at in range(PAGE - 3, PAGE + 2):
        bench.all_logits(Part(first, at, at + 1))
    turn = bench.sequence(tokens, [1, 20, 21])
    turn.tables[STATE][0] = slot_of(first.rolling)
    actual = bench.all_logits(Part(turn, PAGE, len(tokens)))
    cold = bench.sequence(tokens, [30, 31, 32])
    wanted = bench.all_logits(Part(cold, 0, len(tokens)))[PAGE:]
    assert (actual - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_a_launch_writes_its_own_slots_alone(bench: Bench) -> None:
    """Slots are poisoned, so one that is read without being named shows in the logits."""
    decoding, prompt = (
        bench.sequence(random_tokens(PAGE, 3), [1]),
        bench.sequence(random_tokens(LENGTH, 4), range(2, 6)),
    )
    bench.all_logits(Part(decoding, 0, PAGE - 1), num_decode=0)
    decoding.leave = ()
    before = states_of(bench)
    logits = bench.all_logits(Part(decoding, PAGE - 1, PAGE), Part(prompt, 0, LENGTH))
    assert torch.isfinite(logits).all()
    left = {slot.slot for slot in prompt.leave}
    assert len(left) == 3
    own = {slot_of(sequence.working) for sequence in (decoding, prompt)} | {slot_of(decoding.rolling)}
    assert changed(before, states_of(bench)) == own | left
    assert states_of(bench)[0].count_nonzero() == 0


@pytest.mark.parametrize("wrong", ["nothing", "a boundary early", "another prefix"])
def test_a_wrong_state_changes_the_logits(bench: Bench, wrong: str) -> None:
    """Without this the tests above might compare what no state has a part in."""
    tokens = random_tokens(LENGTH, 5)
    bench.all_logits(Part(bench.sequence(tokens, [1, 2, 3, 4]), 0, LENGTH))
    bench.all_logits(Part(bench.sequence(random_tokens(LENGTH, 6), [11, 12, 13, 14]), 0, LENGTH))
    sound = bench.all_logits(Part(bench.sequence(tokens, [1, 2, 20, 21]), 2 * PAGE, LENGTH))
    hit = bench.sequence(tokens, [1, 2, 20, 21])
    hit.tables[STATE][1] = {"nothing": 0, "a boundary early": 1, "another prefix": 12}[wrong]
    damaged = bench.all_logits(Part(hit, 2 * PAGE, LENGTH))
    if wrong == "nothing":
        # No slot to restore: its working slot, which is poisoned.
        assert damaged.isnan().any()
    else:
        assert (damaged - sound).abs().max() > 1e-2 * sound.abs().max()


def test_a_snapshot_goes_through_bytes(folder: Path) -> None:
    tokens = random_tokens(LENGTH, 7)
    writer, reader = Bench(folder), Bench(folder)
    wanted = writer.all_logits(Part(writer.sequence(tokens, [1, 2, 3, 4]), 0, LENGTH))[2 * PAGE :]
    reader.pages.write_pages(0, [30, 10], writer.pages.read_pages(0, [1, 2]))
    # One snapshot, the newest: those of earlier boundaries are not needed.
    reader.pages.write_pages(STATE, [33], writer.pages.read_pages(STATE, [2]))
    hit = reader.sequence(tokens, [30, 10, 5, 6])
    hit.tables[STATE][1] = 33
    assert torch.equal(reader.all_logits(Part(hit, 2 * PAGE, LENGTH)), wanted)


def test_a_state_keeps_the_models_dtype_beside_fp8_pages() -> None:
    spec = parse_model_spec(make_config("lfm2").to_dict())
    full, state = page_layouts(spec, torch.bfloat16, 64, torch.float8_e4m3fn)
    assert (full.kind, state.kind) == (GroupKind.FULL, GroupKind.STATE)
    assert full.tensors == (PageTensor(2, (64, 2, 16), torch.float8_e4m3fn),)
    assert state.tensors == (PageTensor(1, (2, 48), torch.bfloat16),)
    assert state.page_bytes == 3 * 2 * 48 * 2
    assert full.dtype_code != state.dtype_code


class TestFixedArrays:
    """A captured launch reads arrays of fixed sizes, with rows of padding between; here it runs uncaptured."""

    LIMITS = GraphLimits(6, 128, 256, PAGE, 2, 8, one_phase=False, has_states=(False, True))

    def both(self, folder: Path, one_phase: bool) -> tuple[torch.Tensor, torch.Tensor, Bench, Bench]:
        """Returns the sampled rows' logits of a launch laid out in a bucket and of a plain one, and their benches."""
        fixed, plain = Bench(folder), Bench(folder)
        graphs = LaunchGraphs(
            fixed.runner._computed, fixed.runner._last, self.LIMITS._replace(one_phase=one_phase), CPU
        )
        got = []
        for number in range(3):  # a smaller launch after a larger one must not see its rows
            batch, same = (self.batch(bench, number) for bench in (fixed, plain))
            bucket = graphs.bucket_for(batch)
            assert bucket is not None and bucket.num_rows > batch.num_tokens
            with torch.inference_mode():
                graphs._fill(bucket, batch)
                logits = graphs._run(bucket).logits[: len(batch.sampled)]
            got.append((logits, plain.runner.logits(same)))
        return torch.cat([one for one, _ in got]), torch.cat([other for _, other in got]), fixed, plain

    def batch(self, bench: Bench, number: int) -> Batch:
        """Rows that decode, one at the end of its page, beside a fresh prompt and one behind a snapshot; or fewer."""
        page = 12 * number + 1

        def behind(length: int, seed: int, *pages: int) -> PagedTokens:
            sequence = bench.sequence(random_tokens(length, seed), pages)
            bench.all_logits(Part(sequence, 0, length - 1), num_decode=0)
            return sequence

        decoding = [
            behind(9, 1 + number, page),
            behind(PAGE, 2 + number, page + 1),
            behind(PAGE + 1, 3, page + 2, page + 3),
        ]
        prompt = bench.sequence(random_tokens(38, 4 + number), range(page + 4, page + 7))
        cached = random_tokens(LENGTH, 5 + number)
        bench.all_logits(Part(bench.sequence(cached[:PAGE], [page + 7]), 0, PAGE))
        hit = bench.sequence(cached, range(page + 7, page + 11))
        parts = [Part(entry, len(entry.tokens) - 1, len(entry.tokens)) for entry in decoding]
        chunks = [Part(prompt, 0, 38), Part(hit, PAGE, LENGTH)]
        return bench.batch(*(([*parts, *chunks], [parts[0], chunks[1]], parts)[number]))

    @pytest.mark.parametrize("one_phase", [False, True])
    def test_they_name_the_same_slots(self, folder: Path, one_phase: bool) -> None:
        got, wanted, fixed, plain = self.both(folder, one_phase)
        assert (got - wanted).abs().max() <= 1e-5 * wanted.abs().max()
        assert changed(states_of(fixed), torch.full_like(states_of(fixed), torch.nan)) == changed(
            states_of(plain), torch.full_like(states_of(plain), torch.nan)
        )
        assert (states_of(fixed).nan_to_num() - states_of(plain).nan_to_num()).abs().max() <= 1e-5
        assert states_of(fixed)[0].count_nonzero() == 0
