"""Captured launches: their shapes anywhere; on a GPU, replays give the bits and tokens of uncaptured launches."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from cli.random_model import make_random_model
from tests.device_waits import no_device_waits
from tests.worker_service.model_kit import PAGE, Bench, PagedTokens, Part, make_reference, random_tokens
from tests.worker_service.stored_models import FORMATS, make_fp8, make_mxfp4
from worker_service.core.batch import Batch
from worker_service.model.device import prepare_process
from worker_service.model.gemm_dispatch import Invariance
from worker_service.model.last_tokens import LastTokens
from worker_service.model.launch_buckets import (
    SHORT_KEYS,
    GraphLimits,
    batch_sizes,
    buckets,
    chosen_keys,
    prompt_keys,
    prompt_sizes,
)
from worker_service.model.launch_graphs import GraphOutput, LaunchGraphs
from worker_service.model.launch_inputs import LaunchInputs
from worker_service.model.runner import RunnerLimits

CUDA = torch.device("cuda", 0)
if torch.cuda.is_available():
    prepare_process(CUDA, 0)

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
# The demo model is wide enough for the GEMM of decode rows; the others are not.
MODELS = ("llama-wide-heads-yarn", "qwen3-tied-windows", "demo", "lfm2", "bamba", "falcon-h1")
# What makes the folders of others than model_kit's.
MAKERS: dict[str, Callable[[Path], object]] = {
    "demo": partial(make_random_model, seed=3),
    "deepseek-v3-fp8": partial(make_fp8, model="deepseek-v3"),
    "gpt-oss-mxfp4": make_mxfp4,
}
MAX_NUM_SEQS = 12


@pytest.mark.parametrize("most", [1, 3, 8, 24, 61, 64, 65, 200, 256])
def test_batch_sizes_reach_their_end_in_bounded_steps(most: int) -> None:
    sizes = batch_sizes(most)
    assert sizes[-1] == most
    assert list(sizes) == sorted(set(sizes))
    assert len(sizes) <= 11 + most // 32
    for rows in range(1, most + 1):
        size = min(size for size in sizes if size >= rows)
        assert size - rows < max(8, rows)


def test_prompts_are_captured_up_to_the_budget() -> None:
    limits = GraphLimits(4, 100, 512, PAGE, 1, 8, one_phase=False)
    assert [bucket[:4] for bucket in buckets(limits) if not bucket.prompt_tokens] == [
        (1, 0, 0, 0),
        (2, 0, 0, 0),
        (4, 0, 0, 0),
    ]
    prompts = {(bucket.num_decode, bucket.prompt_tokens) for bucket in buckets(limits) if bucket.prompt_tokens}
    assert {size for num_decode, size in prompts if not num_decode} == {16, 32, 48, 64, 80, 96, 100}
    assert {pair for pair in prompts if pair[0]} == {(4, 16), (4, 64)}
    strict = buckets(limits._replace(one_phase=True))
    assert {bucket.num_decode for bucket in strict} == {0}
    assert [bucket.prompt_tokens for bucket in strict if not bucket.num_logits] == [1, 2, 4]
    many = buckets(GraphLimits(32, 512, 512, PAGE, 1, 8, one_phase=True))
    assert {bucket.num_logits for bucket in many} == {0, 32}


def test_a_single_prompt_of_few_tokens_has_a_graph_of_its_own() -> None:
    """Attention shares the keys of few rows where there cannot be other prompts, and does not if they are few."""
    limits = GraphLimits(4, 100, 512, PAGE, 1, 8, one_phase=False)

    def prompts(limits: GraphLimits) -> dict[tuple[int, int], list[tuple[int, int]]]:
        found: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for bucket in buckets(limits):
            if bucket.prompt_tokens:
                found.setdefault(bucket[:2], []).append((bucket.num_prompts, bucket.prompt_keys))
        return found

    kinds, several = [(4, SHORT_KEYS), (1, 0), (4, 0)], [(4, 0)]
    assert {size for size, found in prompts(limits).items() if found == kinds} == {(0, 16), (0, 32), (4, 16)}
    assert all(found in (kinds, several) for found in prompts(limits).values())
    with_states, single = prompts(limits._replace(has_states=(False, True))), prompts(limits._replace(max_num_seqs=1))
    assert with_states and all(found == several for found in with_states.values())
    assert single and all(found == [(1, 0)] for found in single.values())
    over_latents = prompts(limits._replace(max_prompt_keys=2048))
    assert {count for found in over_latents.values() for count, _ in found} == {4}


def test_prompts_over_latents_are_captured_for_several_numbers_of_keys() -> None:
    limits = GraphLimits(64, 2048, 40_960, PAGE, 1, 8, one_phase=False, max_prompt_keys=16_384)
    assert prompt_keys(limits) == (1024, 2048, 4096, 8192, 16_384)
    alone = {bucket.prompt_keys for bucket in buckets(limits) if bucket[:2] == (0, 1024)}
    mixed = {bucket.prompt_keys for bucket in buckets(limits) if bucket[:2] == (64, 1024)}
    assert (alone, mixed) == (set(prompt_keys(limits)), {4096, 16_384})
    assert {bucket.prompt_keys for bucket in buckets(limits) if bucket[:2] == (0, 2048)} == set(prompt_keys(limits)[1:])
    assert {bucket.prompt_keys for bucket in buckets(limits) if not bucket.prompt_tokens} == {0}
    assert not any(bucket.prompt_tokens for bucket in buckets(limits._replace(max_prompt_keys=512)))


@pytest.mark.parametrize("most", [64, 2048, 5000, 66_048, 163_840, 1 << 20])
def test_prompts_of_any_length_are_captured_where_keys_are_chosen(most: int) -> None:
    bounds = chosen_keys(most)
    assert bounds[-1] == most and list(bounds) == sorted(set(bounds))
    assert all(above <= 8 * below for below, above in pairwise(bounds))
    limits = GraphLimits(64, 2048, most, PAGE, 1, 8, one_phase=False, max_prompt_keys=most, chooses_keys=True)
    alone = {bucket.prompt_keys for bucket in buckets(limits) if bucket[:2] == (0, 2048)}
    mixed = {bucket.prompt_keys for bucket in buckets(limits) if bucket[:2] == (64, 1024)}
    assert alone == set(bounds)
    assert mixed <= alone and most in mixed and len(mixed) == min(2, (len(bounds) + 1) // 2)
    assert len(buckets(limits)) <= 111


def test_where_keys_are_chosen_the_longest_prompt_counts(tmp_path: Path) -> None:
    """A launch has logits for each of its rows: over the keys of that row's prompt alone."""
    make_reference("llama", tmp_path)
    bench, cpu = Bench(tmp_path), torch.device("cpu")
    limits = GraphLimits(4, 64, 9000, PAGE, 1, 8, one_phase=False, max_prompt_keys=9000, chooses_keys=True)
    graphs = LaunchGraphs(never, LastTokens(12, cpu), limits, cpu)
    one, other = (bench.sequence(random_tokens(8000, seed), range(1, 570)) for seed in (1, 2))

    def keys(*parts: Part) -> int | None:
        bucket = graphs.bucket_for(bench.batch(*parts))
        return bucket and bucket.prompt_keys

    assert keys(Part(one, 2000, 2030), Part(other, 2018, 2048)) == 2048
    assert keys(Part(one, 2000, 2030), Part(other, 2020, 2049)) == 9000
    assert keys(Part(one, 7000, 7030), Part(other, 7970, 8000)) == 9000
    assert keys(Part(one, 7999, 8000), Part(other, 30, 60)) == 9000  # beside decode rows: fewer graphs


def test_a_launch_with_more_keys_gets_a_wider_graph_or_none(tmp_path: Path) -> None:
    make_reference("llama", tmp_path)
    bench, cpu = Bench(tmp_path), torch.device("cpu")
    limits = GraphLimits(4, 64, 4096, PAGE, 1, 8, one_phase=False, max_prompt_keys=2048)
    graphs = LaunchGraphs(never, LastTokens(12, cpu), limits, cpu)
    pages = range(1, 140)
    decoding, prompt = (bench.sequence(random_tokens(length, length), pages) for length in (2000, 2100))

    def keys(*parts: Part) -> int | None:
        bucket = graphs.bucket_for(bench.batch(*parts))
        return bucket and bucket.prompt_keys

    assert keys(Part(prompt, 0, 60)) == 1024
    assert keys(Part(prompt, 1000, 1024)) == 1024
    assert keys(Part(prompt, 1000, 1025)) == 2048
    assert keys(Part(prompt, 2040, 2049)) is None
    assert keys(Part(decoding, 1999, 2000), Part(prompt, 2000, 2048)) == 2048  # decode rows' keys do not count
    assert keys(Part(prompt, 1000, 1030), Part(prompt, 1000, 1019)) is None


@pytest.mark.parametrize("budget", [16, 100, 2048, 3000, 8192])
def test_a_prompt_of_any_length_gets_a_graph_with_few_padding_rows(budget: int) -> None:
    sizes = prompt_sizes(budget)
    assert list(sizes) == sorted(set(sizes)) and sizes[-1] == budget
    for tokens in range(1, budget + 1):
        size = min(size for size in sizes if size >= tokens)
        assert size - tokens < max(16 if tokens <= 128 else 32, tokens / 16)


@pytest.mark.parametrize("one_phase", [False, True])
def test_a_launch_gets_the_smallest_graph_that_gives_its_logits(one_phase: bool, tmp_path: Path) -> None:
    make_reference("llama", tmp_path)
    bench, cpu = Bench(tmp_path), torch.device("cpu")
    graphs = LaunchGraphs(never, LastTokens(12, cpu), GraphLimits(4, 512, 256, PAGE, 1, 8, one_phase), cpu)
    decoding = [bench.sequence(random_tokens(9, seed), [seed]) for seed in (1, 2, 3)]
    prompt = bench.sequence(random_tokens(70, 4), range(4, 10))
    long = bench.sequence(random_tokens(SHORT_KEYS + 44, 5), range(10, 11 + (SHORT_KEYS + 44) // PAGE))
    rows = [Part(entry, 8, 9) for entry in decoding]

    def sizes(*parts: Part) -> tuple[int, int] | None:
        bucket = graphs.bucket_for(bench.batch(*parts))
        return bucket and (bucket.num_decode, bucket.prompt_tokens)

    def num_prompts(*parts: Part) -> int | None:
        bucket = graphs.bucket_for(bench.batch(*parts))
        return bucket and bucket.num_prompts

    assert num_prompts(Part(prompt, 0, 16)) == num_prompts(Part(prompt, 0, 33)) == 4
    assert [num_prompts(Part(long, end - 16, end)) for end in (SHORT_KEYS, SHORT_KEYS + 1)] == [4, 1]
    assert num_prompts(Part(long, SHORT_KEYS + 34, SHORT_KEYS + 44), Part(decoding[0], 0, 7)) == 4
    assert sizes(*rows) == ((0, 4) if one_phase else (4, 0))
    assert sizes(rows[0]) == ((0, 1) if one_phase else (1, 0))
    assert sizes(Part(prompt, 0, 70)) == (0, 80)
    assert sizes(Part(prompt, 0, 16)) == (0, 16)  # a chunk that samples nothing
    assert sizes(*rows, Part(prompt, 0, 60)) == ((0, 64) if one_phase else (4, 64))
    assert sizes(*rows, *rows) is None  # more sequences than the tables have rows
    every_logit = bench.batch(Part(prompt, 0, 70))
    wanted = replace(every_logit, logits_rows=array("i", range(70)))
    assert graphs.bucket_for(wanted) is None


def never(inputs: LaunchInputs, logits_rows: torch.Tensor | None) -> GraphOutput:
    raise AssertionError("nothing is captured here")


class Twins:
    """One model with and without graphs; each has pages of its own, so that neither heals what the other spoils."""

    def __init__(self, folder: Path, invariance: Invariance) -> None:
        self.captured, self.plain = (
            Bench(
                folder,
                CUDA,
                torch.bfloat16,
                RunnerLimits(MAX_NUM_SEQS, 256, invariance, graphs=graphs),
                kept_formats=FORMATS,
            )
            for graphs in (True, False)
        )

    def decode(self, lengths: list[int], **sampling: object) -> tuple[Batch, Batch]:
        """A launch of one new token behind prompts of such lengths, which were computed before: for each twin."""
        sequences = [random_tokens(length + 1, length) for length in lengths]
        batches = []
        for bench in (self.captured, self.plain):
            rows: list[PagedTokens] = []
            for place, tokens in enumerate(sequences):
                rows.append(bench.sequence(tokens, range(3 * place + 1, 3 * place + 4), **sampling))
                bench.all_logits(Part(rows[-1], 0, len(tokens) - 1))
                # What decodes leaves states of prompts no more.
                rows[-1].snapshots = ()
            batches.append(bench.batch(*(Part(row, len(row.tokens) - 1, len(row.tokens)) for row in rows)))
        return batches[0], batches[1]


@pytest.fixture(
    scope="module",
    params=[
        *((name, kind) for name in MODELS for kind in (Invariance.STRICT, Invariance.BATCH)),
        ("deepseek-v3", Invariance.BATCH),
        ("kimi-linear", Invariance.BATCH),
        # With experts as they are stored.
        ("deepseek-v3-fp8", Invariance.BATCH),
        ("gpt-oss-mxfp4", Invariance.BATCH),
        # Sparse layers are planned on the device in any invariance, and layers with compressed entries not at all.
        *(
            (name, kind)
            for name in ("deepseek-v32", "glm-dsa", "deepseek-v4")
            for kind in (Invariance.STRICT, Invariance.BATCH)
        ),
    ],
    ids=lambda param: f"{param[0]}-{param[1].value}",
)
def twins(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Twins:
    name, invariance = request.param
    folder = tmp_path_factory.mktemp(name)
    if (make := MAKERS.get(name)) is not None:
        make(folder)
    else:
        make_reference(name, folder)
    return Twins(folder, invariance)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("lengths", [[5], [1, 40], [PAGE, PAGE - 1, 2 * PAGE], [7] * 5, list(range(20, 32))], ids=str)
def test_a_replay_has_the_bits_of_the_launch(twins: Twins, lengths: list[int]) -> None:
    one, other = twins.decode(lengths)
    assert is_captured(twins.captured, one)
    assert torch.equal(twins.captured.runner.logits(one), twins.plain.runner.logits(other))
    assert twins.captured.runner.run(one) == twins.plain.runner.run(other)
    for layer in range(len(twins.captured.config.layers)):
        for mine, its in zip(*(b.pages.planes(layer) for b in (twins.captured, twins.plain)), strict=True):
            assert mine[0].count_nonzero() == 0, "a padding row reached the reserved page"
            assert torch.equal(mine.nan_to_num(), its.nan_to_num())


@pytest.mark.gpu
@needs_gpu
def test_replays_follow_each_other_without_a_trace(twins: Twins) -> None:
    """A larger launch leaves its rows in the static buffers; a smaller one after it must not see them."""
    for lengths in ([30] * 12, [3], [17, 18], [30] * 12, [3]):
        one, other = twins.decode(lengths)
        assert twins.captured.runner.run(one) == twins.plain.runner.run(other)


@pytest.mark.gpu
@needs_gpu
def test_sampling_parameters_hold_behind_a_replay(twins: Twins) -> None:
    one, other = twins.decode([9, 20, 31], temperature=0.9, top_k=30, seed=4, repetition_penalty=1.3, logprobs=3)
    wanted = twins.plain.runner.run(other)
    assert twins.captured.runner.run(one) == wanted
    assert all(entry is not None and len(entry.top) == 3 for entry in wanted.logprobs)


@pytest.mark.gpu
@needs_gpu
def test_a_replay_waits_for_nothing_but_its_tokens(twins: Twins) -> None:
    one, other = twins.decode([9, 20, 31])
    wanted = twins.plain.runner.run(other)
    # A first replay changes the states of its rows.
    assert twins.captured.runner.run(one) == wanted
    again, _ = twins.decode([9, 20, 31])
    with no_device_waits():
        assert twins.captured.runner.run(again) == wanted


def is_captured(bench: Bench, batch: Batch) -> bool:
    return bench.runner._graphs is not None and bench.runner._graphs.bucket_for(batch) is not None


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("cut", [0, 1, 14, PAGE, 33])
def test_prompts_in_a_replay_have_the_bits_of_the_launch(twins: Twins, cut: int) -> None:
    """A prompt shorter than any window, chunks behind a prefix, chunks that sample nothing, several at once."""
    results = []
    for bench in (twins.captured, twins.plain):
        long, short = bench.sequence(random_tokens(45, 1), [1, 2, 3]), bench.sequence(random_tokens(3, 2), [4])
        other = bench.sequence(random_tokens(40, 3), [5, 6, 7])
        if cut:
            bench.all_logits(Part(long, 0, cut))
        batches = [bench.batch(Part(long, cut, 45), Part(short, 0, 3)), bench.batch(Part(other, 0, 20))]
        assert all(is_captured(bench, batch) is (bench is twins.captured) for batch in batches)
        results.append([bench.runner.logits(batches[0]), bench.runner.run(batches[0]), bench.runner.run(batches[1])])
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1:] == results[1][1:]
    assert results[0][2].token_ids == ()
    for layer in range(len(twins.captured.config.layers)):
        for mine, its in zip(*(b.pages.planes(layer) for b in (twins.captured, twins.plain)), strict=True):
            assert torch.equal(mine[:8].nan_to_num(), its[:8].nan_to_num())


@pytest.mark.gpu
@needs_gpu
def test_what_no_graph_holds_runs_uncaptured(twins: Twins) -> None:
    """More sequences than the static buffers have rows."""
    bench = twins.captured
    one, other = twins.decode([4] * (MAX_NUM_SEQS + 1))
    assert not is_captured(bench, one)
    assert bench.runner.run(one) == twins.plain.runner.run(other)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("cut", [0, 5, PAGE, 33])
def test_prompts_beside_decode_rows_have_the_bits_of_the_launch(twins: Twins, cut: int) -> None:
    results = []
    for bench in (twins.captured, twins.plain):
        decoding = [bench.sequence(random_tokens(length, length), [page]) for page, length in ((1, 8), (2, 15), (3, 2))]
        long, short = bench.sequence(random_tokens(45, 1), [4, 5, 6]), bench.sequence(random_tokens(3, 2), [7])
        for sequence, end in [(entry, len(entry.tokens) - 1) for entry in decoding] + ([(long, cut)] if cut else []):
            bench.all_logits(Part(sequence, 0, end), num_decode=0)
        rows = [Part(entry, len(entry.tokens) - 1, len(entry.tokens)) for entry in decoding]
        batches = [
            bench.batch(*rows, Part(long, cut, 45), Part(short, 0, 3)),
            bench.batch(rows[1], Part(long, cut, 40)),
        ]
        assert all(is_captured(bench, batch) is (bench is twins.captured) for batch in batches)
        results.append([torch.cat([bench.runner.logits(batch) for batch in batches]), *map(bench.runner.run, batches)])
        for layer in range(len(bench.config.layers)):
            assert all(pages[0].count_nonzero() == 0 for pages in bench.pages.planes(layer))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1:] == results[1][1:]
    assert [len(result.token_ids) for result in results[0][1:]] == [5, 1]


@pytest.mark.gpu
@needs_gpu
def test_fast_launches_are_near(tmp_path: Path) -> None:
    """Nothing is promised of their bits: a graph's padding rows may choose another GEMM."""
    make_random_model(tmp_path, seed=3)
    fast, plain = Twins(tmp_path, Invariance.FAST), Twins(tmp_path, Invariance.BATCH)
    for lengths in ([5], [1, 40], [7] * 5):
        got = fast.captured.runner.logits(fast.decode(lengths)[0])
        wanted = plain.plain.runner.logits(plain.decode(lengths)[1])
        assert (got - wanted).abs().max() < 0.15 * wanted.std()
