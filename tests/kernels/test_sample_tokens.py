"""sample_tokens and top_logprobs: the reference's tokens in every implementation, alone and in a batch."""

from __future__ import annotations

import pytest
import torch

from kernels.backend import Backend
from kernels.errors import KernelArgumentError
from kernels.sample_tokens import sample_tokens
from kernels.top_logprobs import top_logprobs
from tests.kernels.compare import assert_same_bits
from tests.kernels.sampling_inputs import SampledCase, sampled_case
from tests.kernels.target import Target

# One chunk of the kernel or a part of it, some chunks, several tiles.
VOCABS = (1, 64, 97, 300, 9000)


def tokens_of(case: SampledCase, backend: Backend, *, counted: bool = True) -> torch.Tensor:
    held = case.counts._replace(counts=case.counts.counts.clone()) if counted else None
    return sample_tokens(case.logits, case.params, held, backend=backend)


def on(case: SampledCase, target: Target) -> SampledCase:
    params, counts = (type(part)(*(values.to(target.device) for values in part)) for part in case[1:])
    return SampledCase(case.logits.to(target.device), params, counts)


@pytest.mark.parametrize("vocab_size", VOCABS)
@pytest.mark.parametrize("seed", [0, 1])
def test_tokens_and_counts_are_the_references(target: Target, vocab_size: int, seed: int) -> None:
    case = sampled_case(12, vocab_size, seed)
    counts = [case.counts._replace(counts=case.counts.counts.clone()) for _ in range(2)]
    wanted = sample_tokens(case.logits, case.params, counts[0], backend=Backend.REFERENCE)
    mine = on(case._replace(counts=counts[1]), target)
    assert_same_bits(sample_tokens(*mine, backend=target.backend).cpu(), wanted)
    assert_same_bits(mine.counts.counts.cpu(), counts[0].counts)


FILTERS: dict[str, dict[str, float]] = {
    "temperature": {},
    "few of many": {"top_k": 5},
    "more than chunks": {"top_k": 40},
    "half of the mass": {"top_p": 0.5},
    "hardly any mass": {"top_p": 1e-3},
    "nearly all": {"top_p": 0.999},
    "min_p": {"min_p": 0.2},
    "the best alone": {"min_p": 1.0},
    "all": {"top_k": 50, "top_p": 0.7, "min_p": 0.02},
}


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("scale", [0.0, 0.05, 1.0, 30.0])
def test_flat_and_steep_rows(target: Target, name: str, scale: float) -> None:
    """Flat rows are drawn again most often; in the flattest one, of equal scores, token ids alone decide."""
    case = sampled_case(6, 1000, 3).replaced(
        temperature=0.7, top_k=0, top_p=1.0, min_p=0.0, repetition=1.0, presence=0.0, frequency=0.0, slots=-1
    )
    case = case._replace(logits=case.logits * scale).replaced(**FILTERS[name])
    wanted = tokens_of(case, Backend.REFERENCE, counted=False)
    assert_same_bits(tokens_of(on(case, target), target.backend, counted=False).cpu(), wanted)


def test_a_row_is_alone(target: Target) -> None:
    """Its token depends on no other row, nor on their order, nor on the stride between them."""
    case = on(sampled_case(8, 300, 4), target)
    together = tokens_of(case, target.backend)
    alone = torch.cat([tokens_of(case.rows(at), target.backend) for at in range(8)])
    assert_same_bits(alone, together)
    assert_same_bits(tokens_of(case.rows(*range(7, -1, -1)), target.backend), together.flip(0))
    wide = torch.zeros(8, 320, dtype=case.logits.dtype, device=target.device)
    wide[:, :300] = case.logits
    assert_same_bits(tokens_of(case._replace(logits=wide[:, :300]), target.backend), together)


def test_a_repeated_launch_counts_once_and_gives_the_same_tokens(target: Target) -> None:
    case = on(sampled_case(12, 97, 5), target)
    first = sample_tokens(*case, backend=target.backend)
    counts = case.counts.counts.clone()
    assert_same_bits(sample_tokens(*case, backend=target.backend), first)
    assert_same_bits(case.counts.counts, counts)


def test_penalties_by_hand(target: Target) -> None:
    """Token 2 is in the prompt, 4 was generated twice, 5 is the newest token and not counted yet."""
    case = sampled_case(1, 8, 6).replaced(
        temperature=0.0, repetition=2.0, presence=0.5, frequency=0.25, slots=0, top_k=0, top_p=1.0, min_p=0.0
    )
    held = torch.zeros(1, 9, dtype=torch.int32)
    held[0, [2, 4, 8]] = torch.tensor([1, 4, 9], dtype=torch.int32)
    counts = case.counts._replace(
        counts=held, token_ids=torch.tensor([5]).int(), positions=torch.tensor([9]).int(), rows=torch.tensor([0]).int()
    )
    best = {
        (0, 0, 4.1, 0, 0, 0, 2.0, 0): 2,  # 2.05 after the penalty
        (0, 0, 3.9, 0, 0, 0, 2.0, 0): 6,
        (-9, -9, -1.0, -9, -9, -9, -2.1, -9): 2,  # -2 after it
        (0, 0, 0, 0, 6.1, 0, 2.0, 0): 4,  # 6.1 / 2 - 2 * 0.25 - 0.5
        (0, 0, 0, 0, 5.9, 0, 2.0, 0): 6,
        (0, 0, 0, 0, 0, 5.6, 2.0, 0): 5,  # 5.6 / 2 - 0.25 - 0.5
        (0, 0, 0, 0, 0, 5.4, 2.0, 0): 6,
    }
    for scores, wanted in best.items():
        row = case._replace(logits=torch.tensor([scores], dtype=torch.float32), counts=counts)
        assert tokens_of(on(row, target), target.backend).tolist() == [wanted]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("vocab_size", "count"), [(1, 1), (97, 0), (97, 97), (300, 5), (9000, 64)])
def test_top_logprobs(target: Target, vocab_size: int, count: int, dtype: torch.dtype) -> None:
    """bf16 rows have ties, which rank by token id as a stable sort does."""
    logits = sampled_case(5, vocab_size, 7, dtype=dtype).logits
    tokens = logits.argmin(dim=-1).int()
    got = top_logprobs(logits.to(target.device), tokens.to(target.device), count, backend=target.backend)
    wanted = logits.double().log_softmax(dim=-1)
    best = logits.float().sort(dim=-1, descending=True, stable=True).indices[:, :count]
    assert_same_bits(got.top_tokens.cpu(), best.int())
    torch.testing.assert_close(got.top_logprobs.cpu().double(), wanted.gather(1, best), rtol=1e-6, atol=1e-5)
    own = wanted.gather(1, tokens.long().unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(got.logprobs.cpu().double(), own, rtol=1e-6, atol=1e-5)


def test_top_logprobs_of_equal_logits(target: Target) -> None:
    logits = torch.zeros(2, 200, device=target.device)
    logits[1, 150] = -0.0
    got = top_logprobs(logits, torch.zeros(2, dtype=torch.int32, device=target.device), 9, backend=target.backend)
    assert got.top_tokens.tolist() == [list(range(9))] * 2


def test_no_rows(target: Target) -> None:
    case = on(sampled_case(3, 50), target).rows()
    assert tokens_of(case._replace(counts=case.counts), target.backend).shape == (0,)
    tokens = torch.empty(0, dtype=torch.int32, device=target.device)
    assert top_logprobs(case.logits, tokens, 3, backend=target.backend).top_tokens.shape == (0, 3)


CASE = sampled_case(4, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": CASE.logits[0]}, r"logits: shape must be \[any, any\], got \[64\]"),
        ({"logits": CASE.logits[:, :0]}, "logits: the vocabulary is empty"),
        ({"params": CASE.params._replace(top_k=CASE.params.top_k.long())}, "top_k: dtype must be one of"),
        ({"params": CASE.params._replace(key_low=CASE.params.key_low[:3])}, r"key_low: shape must be \[4\], got \[3\]"),
        ({"counts": CASE.counts._replace(counts=CASE.counts.counts[:, 1:])}, r"counts: shape must be \[any, 65\]"),
        ({"counts": CASE.counts._replace(rows=CASE.counts.rows[1:])}, r"rows: shape must be \[4\], got \[3\]"),
        ({"out": torch.empty(4, dtype=torch.int64)}, "out: dtype must be one of"),
    ],
)
def test_what_is_refused(change: dict[str, object], message: str) -> None:
    given: dict[str, object] = {"logits": CASE.logits, "params": CASE.params, "counts": None}
    with pytest.raises(KernelArgumentError, match=message):
        sample_tokens(**(given | change))  # type: ignore[arg-type]


def test_what_top_logprobs_refuse() -> None:
    tokens = torch.zeros(4, dtype=torch.int32)
    with pytest.raises(KernelArgumentError, match=r"count: must be 0 \.\. 64, is 65"):
        top_logprobs(CASE.logits, tokens, 65)
    with pytest.raises(KernelArgumentError, match="tokens: dtype must be one of"):
        top_logprobs(CASE.logits, tokens.long(), 5)
