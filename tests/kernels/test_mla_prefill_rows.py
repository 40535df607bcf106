"""mla_prefill where few new tokens leave a consumer without rows: the bits of longer prompts, on a Hopper GPU."""

import random
from typing import NamedTuple

import pytest
import torch

from kernels.attention import with_lse
from kernels.backend import is_hopper
from kernels.mla_prefill import BLOCK, AttentionState, mla_prefill, mla_prefill_part
from tests.kernels.compare import assert_same_bits
from tests.kernels.inputs import running_sums
from tests.kernels.mla_inputs import NOPE, LatentCase, make_latents, projected
from tests.kernels.target import HOPPER as TARGET

pytestmark = pytest.mark.gpu

# New tokens of the prompts that are compared with: all of their tiles have rows of both consumers.
LONG = 2 * BLOCK
COUNTS = [1, 16, 63, 64, 65, 100, 128, 129, 200]
# Keys that are cached, and new tokens.
BATCH = [(300, 16), (0, 64), (40, 0), (128, 65), (0, 0), (513, 1), (90, 200), (7, 0)]
Keys = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Batch(NamedTuple):
    """The first queries of each of a case's sequences, and where their keys lie."""

    q: torch.Tensor
    rows: torch.Tensor
    cu_q: torch.Tensor
    most: int
    cached: list[int]
    totals: list[int]
    starts: list[int]


@pytest.fixture(autouse=True)
def hopper() -> None:
    if not torch.cuda.is_available() or not is_hopper(torch.device("cuda", 0)):
        pytest.skip("needs a Hopper GPU")


def spans(firsts: list[int], counts: list[int]) -> torch.Tensor:
    """Returns the numbers of runs of rows, one behind the other."""
    pairs = zip(firsts, counts, strict=True)
    return torch.cat([torch.arange(first, first + count) for first, count in pairs]).to(TARGET.device)


def first_queries(case: LatentCase, counts: list[int]) -> Batch:
    rows = spans([case.rows(seq).start for seq in range(len(counts))], counts)
    return Batch(
        q=case.q[rows],
        rows=rows,
        cu_q=running_sums(counts, TARGET.device),
        most=max(counts),
        cached=case.cached,
        totals=[cached + count for cached, count in zip(case.cached, counts, strict=True)],
        starts=[sum(case.totals[:seq]) for seq in range(len(counts))],
    )


def keys_of(batch: Batch, keys: Keys, first: int = 0, most: int = 1 << 30) -> tuple[Keys, torch.Tensor]:
    """Returns the keys of each sequence from `first` on, at most `most`, with a block of NaN behind them; and the
    running sums of how many each sequence has."""
    counts = [min(max(total - first, 0), most) for total in batch.totals]
    rows = spans([start + first for start in batch.starts], counts)
    k_nope, k_rope, v = (torch.cat([part[rows], torch.full_like(part[:BLOCK], float("nan"))]) for part in keys)
    return (k_nope, k_rope, v), running_sums(counts, TARGET.device)


def attend(batch: Batch, keys: Keys) -> tuple[torch.Tensor, torch.Tensor]:
    part, cu_k = keys_of(batch, keys)
    return with_lse(mla_prefill, batch.q, *part, batch.cu_q, cu_k, batch.most, backend=TARGET.backend)


def attend_in_parts(batch: Batch, keys: Keys, cut: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns output and log-sum-exps of a softmax that is carried on from `cut` keys to the next."""
    state = AttentionState.empty(len(batch.q), batch.q.shape[1], NOPE, TARGET.device)
    for first in range(0, max(batch.totals), cut):
        part, cu_k = keys_of(batch, keys, first, cut)
        offsets = torch.tensor([cached - first for cached in batch.cached], dtype=torch.int32, device=TARGET.device)
        bounds = (batch.cu_q, cu_k, batch.most)
        if first + cut < max(batch.totals):
            mla_prefill_part(
                batch.q, *part, *bounds, state, resumes=first > 0, q_offsets=offsets, backend=TARGET.backend
            )
        else:
            got = with_lse(mla_prefill, batch.q, *part, *bounds, state=state, q_offsets=offsets, backend=TARGET.backend)
    return got


def make(cached: list[int], heads: int = 2) -> tuple[LatentCase, Keys]:
    case = make_latents([(tokens, LONG) for tokens in cached], heads, device=TARGET.device)
    return case, projected(case)


def assert_rows_of(
    whole: tuple[torch.Tensor, torch.Tensor], got: tuple[torch.Tensor, torch.Tensor], batch: Batch
) -> None:
    assert_same_bits(got[0], whole[0][batch.rows])
    assert_same_bits(got[1], whole[1][:, batch.rows])


@pytest.mark.parametrize("cached", [0, 397, 2 * BLOCK])
@pytest.mark.parametrize("new", COUNTS)
def test_few_queries_have_the_bits_of_many(new: int, cached: int) -> None:
    case, keys = make([cached])
    batch = first_queries(case, [new])
    assert_rows_of(attend(first_queries(case, [LONG]), keys), attend(batch, keys), batch)


def test_a_batch_with_sequences_that_have_no_query() -> None:
    case, keys = make([cached for cached, _ in BATCH])
    batch = first_queries(case, [new for _, new in BATCH])
    assert_rows_of(attend(first_queries(case, [LONG] * len(BATCH)), keys), attend(batch, keys), batch)


def test_every_key_is_visible_if_not_causal() -> None:
    """All rows of a sequence see the same keys, so the longer prompt keeps those of the shorter one."""
    case, keys = make([cached for cached, _ in BATCH])
    batch = first_queries(case, [new for _, new in BATCH])
    long = first_queries(case, [LONG] * len(BATCH))._replace(totals=batch.totals)
    outs = []
    for each in (long, batch):
        part, cu_k = keys_of(each, keys)
        bounds = (each.cu_q, cu_k, each.most)
        outs.append(with_lse(mla_prefill, each.q, *part, *bounds, causal=False, backend=TARGET.backend))
    assert_rows_of(outs[0], outs[1], batch)


@pytest.mark.parametrize("cut", [BLOCK, 2 * BLOCK])
def test_a_softmax_that_is_carried_on(cut: int) -> None:
    case, keys = make([cached for cached, _ in BATCH])
    batch = first_queries(case, [new for _, new in BATCH])
    assert_rows_of(attend(first_queries(case, [LONG] * len(BATCH)), keys), attend_in_parts(batch, keys, cut), batch)


@pytest.mark.parametrize("new", COUNTS)
def test_a_suspended_softmax_has_the_state_of_many_queries(new: int) -> None:
    case, keys = make([700])
    states, batch = [], first_queries(case, [new])
    for each in (first_queries(case, [LONG]), batch):
        state = AttentionState.empty(len(each.q), case.heads, NOPE, TARGET.device)
        for sums in state:
            sums.fill_(float("nan"))
        part, cu_k = keys_of(each, keys, 0, 3 * BLOCK)
        offsets = torch.tensor([700], dtype=torch.int32, device=TARGET.device)
        bounds = (each.cu_q, cu_k, each.most)
        mla_prefill_part(each.q, *part, *bounds, state, resumes=False, q_offsets=offsets, backend=TARGET.backend)
        states.append(state)
    assert_same_bits(states[1].acc, states[0].acc[batch.rows])
    assert_same_bits(states[1].row_max, states[0].row_max[:, batch.rows])
    assert_same_bits(states[1].row_sum, states[0].row_sum[:, batch.rows])


@pytest.mark.parametrize("seed", range(4))
def test_programs_with_several_items_with_and_without_rows(seed: int) -> None:
    """About six items to each of 132 programs, drawn in another order each time."""
    draw = random.Random(seed)
    lengths = [(draw.randrange(500), draw.choice([0, *COUNTS])) for _ in range(40)]
    case, keys = make([cached for cached, _ in lengths], heads=16)
    batch = first_queries(case, [new for _, new in lengths])
    whole = attend(first_queries(case, [LONG] * len(lengths)), keys)
    for _ in range(5):
        assert_rows_of(whole, attend(batch, keys), batch)
