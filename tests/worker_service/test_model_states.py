"""A model with recurrent states, fp32 on the CPU: where a state comes from, where it goes, and that it matters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from session.words import GroupKind, StateSlot
from tests.worker_service.model_kit import (
    CPU,
    Bench,
    PagedTokens,
    Part,
    make_config,
    make_reference,
    page_of,
    random_tokens,
)
from worker_service.core.batch import Batch
from worker_service.core.errors import ModelError
from worker_service.gpu.group_layout import PageTensor
from worker_service.model.attention_specs import LatentSpec
from worker_service.model.config import parse_model_spec, read_model_spec
from worker_service.model.decoder import Decoder
from worker_service.model.launch_buckets import GraphLimits
from worker_service.model.launch_graphs import LaunchGraphs
from worker_service.model.page_layouts import page_layouts

STATE = 1
KINDS = [
    "lfm2",
    "lfm2-biases",
    "bamba",
    "granite-hybrid",
    "falcon-h1",
    "nemotron-h",
    "qwen3-next",
    "qwen3.5",
    "kimi-linear",
]


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    make_reference(request.param, folder)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> Decoder:
    return Bench(folder).model


@pytest.fixture
def bench(folder: Path, model: Decoder) -> Bench:
    return Bench(folder, model=model)


@pytest.fixture
def page(folder: Path) -> int:
    return page_of(read_model_spec(folder))


@pytest.fixture
def length(page: int) -> int:
    """Of a prompt that passes three boundaries."""
    return 3 * page + 5


def states_of(bench: Bench) -> torch.Tensor:
    """Returns every slot's values in one row, the reserved slot first."""
    layers = bench.pages.layouts[STATE].layers
    return torch.cat([plane.flatten(1) for layer in layers for plane in bench.pages.layer_states(layer).planes], dim=1)


def changed(before: torch.Tensor, after: torch.Tensor) -> set[int]:
    same = (before == after) | (before.isnan() & after.isnan())
    return {slot for slot, held in enumerate(same.all(1).tolist()) if not held}


def slot_of(slots: tuple[StateSlot, ...]) -> int:
    return slots[0].slot


@pytest.mark.parametrize("boundary", [1, 2, 3])
def test_a_restored_state_gives_the_bits_of_the_uncut_run(bench: Bench, page: int, length: int, boundary: int) -> None:
    tokens = random_tokens(length, 1)
    whole = bench.all_logits(Part(bench.sequence(tokens, [1, 2, 3, 4]), 0, length))
    hit = bench.sequence(tokens, [*range(1, boundary + 1), *range(20, 24 - boundary)])
    assert torch.equal(bench.all_logits(Part(hit, boundary * page, length)), whole[boundary * page :])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_restored_state_gives_the_bits_of_the_uncut_run_on_a_gpu(folder: Path, page: int, length: int) -> None:
    bench, tokens = Bench(folder, torch.device("cuda", 0), torch.bfloat16), random_tokens(length, 1)
    whole = bench.all_logits(Part(bench.sequence(tokens, [1, 2, 3, 4]), 0, length))
    for boundary in (1, 2, 3):
        hit = bench.sequence(tokens, [*range(1, boundary + 1), *range(20, 24 - boundary)])
        assert torch.equal(bench.all_logits(Part(hit, boundary * page, length)), whole[boundary * page :])


def test_decode_leaves_its_state_at_the_end_of_a_page(bench: Bench, page: int) -> None:
    """A second turn goes on from the rolling snapshot, whose page decoding filled."""
    tokens = random_tokens(2 * page + 7, 2)
    first = bench.sequence(tokens, [1, 2, 3])
    first.snapshots = ()
    bench.all_logits(Part(first, 0, page - 3))
    for at in range(page - 3, page + 2):
        bench.all_logits(Part(first, at, at + 1))
    turn = bench.sequence(tokens, [1, 20, 21])
    turn.tables[STATE][0] = slot_of(first.rolling)
    actual = bench.all_logits(Part(turn, page, len(tokens)))
    cold = bench.sequence(tokens, [30, 31, 32])
    wanted = bench.all_logits(Part(cold, 0, len(tokens)))[page:]
    assert (actual - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_a_launch_writes_its_own_slots_alone(bench: Bench, page: int, length: int) -> None:
    """Slots are poisoned, so one that is read without being named shows in the logits."""
    decoding, prompt = (
        bench.sequence(random_tokens(page, 3), [1]),
        bench.sequence(random_tokens(length, 4), range(2, 6)),
    )
    bench.all_logits(Part(decoding, 0, page - 1), num_decode=0)
    decoding.snapshots = ()
    before = states_of(bench)
    logits = bench.all_logits(Part(decoding, page - 1, page), Part(prompt, 0, length))
    assert torch.isfinite(logits).all()
    left = {slot.slot for slot in prompt.snapshots}
    assert len(left) == 3
    own = {slot_of(sequence.working) for sequence in (decoding, prompt)} | {slot_of(decoding.rolling)}
    assert changed(before, states_of(bench)) == own | left
    assert states_of(bench)[0].count_nonzero() == 0


def test_a_decode_row_leaves_a_state_where_a_branch_was_named_late(bench: Bench, page: int) -> None:
    """Beside its rolling one, and beside another row that decodes."""
    tokens = random_tokens(page + 7, 8)
    late, decoding = bench.sequence(tokens, [1, 2]), bench.sequence(random_tokens(9, 9), [5])
    for sequence, computed in ((late, page - 1), (decoding, 8)):
        bench.all_logits(Part(sequence, 0, computed), num_decode=0)
    parts = [Part(late, page - 1, page), Part(decoding, 8, 9)]
    assert bench.batch(*parts).has_decode_leaves
    bench.all_logits(*parts)
    states = states_of(bench)
    assert all(torch.equal(states[1], states[slot_of(slots)]) for slots in (late.working, late.rolling))
    turn, cold = bench.sequence(tokens, [1, 20]), bench.sequence(tokens, [30, 31])
    actual = bench.all_logits(Part(turn, page, len(tokens)))
    wanted = bench.all_logits(Part(cold, 0, len(tokens)))[page:]
    assert (actual - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_company_changes_no_bit(bench: Bench, page: int, length: int) -> None:
    """Nor of the states: a prompt behind a snapshot, alone, and beside another prompt and a row that decodes."""
    cached, fresh = random_tokens(length, 10), random_tokens(page + 9, 11)
    bench.all_logits(Part(bench.sequence(cached[:page], [1]), 0, page))
    decoding = bench.sequence(random_tokens(7, 12), [30])
    bench.all_logits(Part(decoding, 0, 6))
    alone = bench.sequence(cached, [1, 2, 3, 4])
    wanted = bench.all_logits(Part(alone, page, length))
    among = bench.sequence(cached, [1, 12, 13, 14])
    parts = [Part(decoding, 6, 7), Part(bench.sequence(fresh, [20, 21]), 0, len(fresh)), Part(among, page, length)]
    assert torch.equal(bench.all_logits(*parts)[1 + len(fresh) :], wanted)
    states = states_of(bench)
    for sequence in (alone, among):
        assert torch.equal(states[slot_of(sequence.working)], states[slot_of(alone.working)])
    assert torch.equal(states[[2, 3]], states[[12, 13]])


@pytest.mark.parametrize("wrong", ["nothing", "a boundary early", "another prefix"])
def test_a_wrong_state_changes_the_logits(bench: Bench, page: int, length: int, wrong: str) -> None:
    """Without this the tests above might compare what no state has a part in."""
    tokens = random_tokens(length, 5)
    bench.all_logits(Part(bench.sequence(tokens, [1, 2, 3, 4]), 0, length))
    bench.all_logits(Part(bench.sequence(random_tokens(length, 6), [11, 12, 13, 14]), 0, length))
    sound = bench.all_logits(Part(bench.sequence(tokens, [1, 2, 20, 21]), 2 * page, length))
    hit = bench.sequence(tokens, [1, 2, 20, 21])
    hit.tables[STATE][1] = {"nothing": 0, "a boundary early": 1, "another prefix": 12}[wrong]
    damaged = bench.all_logits(Part(hit, 2 * page, length))
    if wrong == "nothing":
        # No slot to restore: its working slot, which is poisoned.
        assert damaged.isnan().any()
    else:
        assert (damaged - sound).abs().max() > 1e-2 * sound.abs().max()


def test_a_snapshot_goes_through_bytes(folder: Path, page: int, length: int) -> None:
    tokens = random_tokens(length, 7)
    writer, reader = Bench(folder), Bench(folder)
    wanted = writer.all_logits(Part(writer.sequence(tokens, [1, 2, 3, 4]), 0, length))[2 * page :]
    reader.pages.write_pages(0, [30, 10], writer.pages.read_pages(0, [1, 2]))
    # One snapshot, the newest: those of earlier boundaries are not needed.
    reader.pages.write_pages(STATE, [33], writer.pages.read_pages(STATE, [2]))
    hit = reader.sequence(tokens, [30, 10, 5, 6])
    hit.tables[STATE][1] = 33
    assert torch.equal(reader.all_logits(Part(hit, 2 * page, length)), wanted)


def test_a_state_keeps_the_models_dtype_beside_fp8_pages() -> None:
    spec = parse_model_spec(make_config("lfm2").to_dict())
    full, state = page_layouts(spec, torch.bfloat16, 64, torch.float8_e4m3fn)
    assert (full.kind, state.kind) == (GroupKind.FULL, GroupKind.STATE)
    assert full.tensors == (PageTensor(2, (64, 2, 16), torch.float8_e4m3fn),)
    assert state.tensors == (PageTensor(1, (2, 48), torch.bfloat16),)
    assert state.page_bytes == 3 * 2 * 48 * 2
    assert full.dtype_code != state.dtype_code


def test_what_a_recurrence_sums_up_is_fp32_beside_a_models_own_columns() -> None:
    spec = parse_model_spec(make_config("bamba").to_dict())
    _, state = page_layouts(spec, torch.bfloat16, 64)
    columns = PageTensor(1, (3, 96 + 2 * 2 * 16), torch.bfloat16)
    assert state.tensors == (columns, PageTensor(1, (8, 12, 16), torch.float32))
    assert state.page_bytes == 3 * (3 * 160 * 2 + 8 * 12 * 16 * 4)
    with pytest.raises(ModelError, match="page_tokens: 16 is no multiple of 64"):
        page_layouts(spec, torch.bfloat16, 16)


class TestFixedArrays:
    """A captured launch reads arrays of fixed sizes, with rows of padding between; here it runs uncaptured."""

    LIMITS = GraphLimits(6, 0, 256, 0, 2, 8, one_phase=False, has_states=(False, True))

    def both(self, folder: Path, one_phase: bool) -> tuple[torch.Tensor, torch.Tensor, Bench, Bench]:
        """Returns the sampled rows' logits of a launch laid out in a bucket and of a plain one, and their benches."""
        fixed, plain = Bench(folder), Bench(folder)
        limits = self.LIMITS._replace(max_tokens=8 * fixed.page, page_tokens=fixed.page, one_phase=one_phase)
        if any(isinstance(layer.mixer, LatentSpec) for layer in fixed.config.layers):
            if one_phase:
                pytest.skip("latents absorbed for prompts are not captured")
            limits = limits._replace(max_prompt_keys=16 * fixed.page)
        graphs = LaunchGraphs(fixed.runner._computed, fixed.runner._last, limits, CPU)
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
        first, page = 12 * number + 1, bench.page

        def behind(length: int, seed: int, *pages: int) -> PagedTokens:
            sequence = bench.sequence(random_tokens(length, seed), pages)
            bench.all_logits(Part(sequence, 0, length - 1), num_decode=0)
            sequence.snapshots = ()
            return sequence

        decoding = [
            behind(9, 1 + number, first),
            behind(page, 2 + number, first + 1),
            behind(page + 1, 3, first + 2, first + 3),
        ]
        prompt = bench.sequence(random_tokens(38, 4 + number), range(first + 4, first + 7))
        cached = random_tokens(3 * page + 5, 5 + number)
        bench.all_logits(Part(bench.sequence(cached[:page], [first + 7]), 0, page))
        hit = bench.sequence(cached, range(first + 7, first + 11))
        parts = [Part(entry, len(entry.tokens) - 1, len(entry.tokens)) for entry in decoding]
        chunks = [Part(prompt, 0, 38), Part(hit, page, len(cached))]
        return bench.batch(*(([*parts, *chunks], [parts[0], chunks[1]], parts)[number]))

    @pytest.mark.parametrize("one_phase", [False, True])
    def test_they_name_the_same_slots(self, folder: Path, one_phase: bool) -> None:
        got, wanted, fixed, plain = self.both(folder, one_phase)
        assert (got - wanted).abs().max() <= 1e-5 * wanted.abs().max()
        assert changed(states_of(fixed), torch.full_like(states_of(fixed), torch.nan)) == changed(
            states_of(plain), torch.full_like(states_of(plain), torch.nan)
        )
        held, same = (states_of(bench).nan_to_num() for bench in (fixed, plain))
        assert (held - same).abs().max() <= 1e-5 * max(1.0, same.abs().max().item())
        assert states_of(fixed)[0].count_nonzero() == 0
