"""mla_prefill: ragged keys, any offset between queries and keys, and a softmax that is carried on bit by bit."""

import math
from dataclasses import replace

import pytest
import torch

from kernels.attention import with_lse
from kernels.backend import Backend
from kernels.errors import KernelArgumentError
from kernels.mla_prefill import BLOCK, AttentionState, MlaPrefillPlan, mla_prefill, mla_prefill_part
from tests.kernels.compare import assert_attention, assert_lse, assert_output, assert_same_bits
from tests.kernels.inputs import RISES, running_sums
from tests.kernels.mla_inputs import NOPE, ROPE, SCALE, LatentCase, attention_truth, make_latents, projected
from tests.kernels.target import Target

BATCHES = [[(0, 17)], [(13, 1)], [(197, 70), (0, 5), (128, 128)], [(0, 1), (3, 2), (300, 9)]]
Keys = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def make(lengths: list[tuple[int, int]], target: Target, dtype: torch.dtype = torch.bfloat16) -> LatentCase:
    return make_latents(lengths, 2, dtype=dtype, device=target.device)


def rising(case: LatentCase, rise: float) -> tuple[LatentCase, Keys]:
    """Returns a case and its keys, whose scores rise by that many powers of two from tile to tile."""
    k_nope, k_rope, v = projected(case)
    if rise:
        places = torch.cat([torch.arange(total) for total in case.totals])
        k_rope[:, 0] = (places * rise / (BLOCK * SCALE * math.log2(math.e))).to(k_rope)
        q = case.q.clone()
        q[..., NOPE] = 1.0
        case = replace(case, q=q)
    return case, (k_nope, k_rope, v)


def truth(case: LatentCase, keys: Keys, offsets: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    k_nope, k_rope, v = keys
    k = torch.cat([k_nope, k_rope.unsqueeze(1).expand(-1, case.heads, -1)], dim=-1)
    parts, first = [], 0
    for seq, total in enumerate(case.totals):
        part = slice(first, first + total)
        first += total
        parts.append(attention_truth(case.q[case.rows(seq)], k[part], v[part], offsets[seq]))
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts], dim=1)


def run(case: LatentCase, keys: Keys, target: Target, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    bounds = (case.cu_q, case.cu_k, max(case.new))
    return with_lse(mla_prefill, case.q, *keys, *bounds, backend=target.backend, **options)


@pytest.mark.parametrize("lengths", BATCHES)
def test_causal_and_aligned_at_the_bottom_right(target: Target, lengths: list[tuple[int, int]]) -> None:
    for dtype in target.dtypes:
        case = make(lengths, target, dtype)
        assert_attention(run(case, projected(case), target), truth(case, projected(case), case.cached))


@pytest.mark.parametrize("rise", RISES)
def test_scores_that_rise_from_tile_to_tile(target: Target, rise: float) -> None:
    case, keys = rising(make([(397, 70), (0, 300), (128, 3)], target), rise)
    assert_attention(run(case, keys, target), truth(case, keys, case.cached))


def test_sequences_without_a_query_among_others(target: Target) -> None:
    """First, in the middle and last, with keys and without."""
    case = make([(9, 0), (40, 9), (0, 0), (130, 0), (3, 70), (20, 0)], target)
    assert_attention(run(case, projected(case), target), truth(case, projected(case), case.cached))


def test_every_key_is_visible_if_not_causal(target: Target) -> None:
    case = make([(40, 9), (0, 130)], target)
    assert_attention(run(case, projected(case), target, causal=False), truth(case, projected(case), case.totals))


def test_an_offset_says_where_query_0_stands_and_a_query_may_see_nothing(target: Target) -> None:
    case = make([(40, 9), (0, 70), (5, 6), (20, 3)], target)
    offsets = [5, -60, -6, 2000]
    device = torch.tensor(offsets, dtype=torch.int32, device=target.device)
    out, lse = run(case, projected(case), target, q_offsets=device)
    wanted, wanted_lse = truth(case, projected(case), offsets)
    assert_output(out, wanted)
    assert_lse(lse, wanted_lse)
    assert not out[case.rows(2)].any() and bool((lse[:, case.rows(2)] == float("-inf")).all())


def test_query_i_sees_the_cached_keys_and_its_own(target: Target) -> None:
    """3 cached, 2 new: the rows see 4 and 5 keys, not 1 and 2."""
    case = make([(3, 2)], target)
    keys = projected(case)
    before = run(case, keys, target)[0]
    keys[2][4] += 1.0
    after = run(case, keys, target)[0]
    assert_same_bits(after[0], before[0])
    assert not torch.equal(after[1], before[1])
    keys[2][3] += 1.0
    assert not torch.equal(run(case, keys, target)[0][0], before[0])


def test_a_head_may_have_its_own_rotary_key(target: Target) -> None:
    case = make([(20, 6)], target)
    k_nope, k_rope, v = projected(case)
    whole = torch.cat([k_nope, k_rope.unsqueeze(1).expand(-1, case.heads, -1)], dim=-1)
    got = run(case, (whole[..., :NOPE], whole[..., NOPE:], v), target)
    for part, wanted in zip(got, run(case, (k_nope, k_rope, v), target), strict=True):
        assert_same_bits(part, wanted)


def test_rows_behind_the_last_key_are_not_used(target: Target) -> None:
    case = make([(70, 20)], target)
    keys = projected(case)
    longer = tuple(torch.cat([part, torch.full_like(part, float("nan"))]) for part in keys)
    for part, wanted in zip(run(case, longer, target), run(case, keys, target), strict=True):
        assert_same_bits(part, wanted)


@pytest.mark.parametrize("rise", [0.0, *RISES])
@pytest.mark.parametrize("cut", [BLOCK, 2 * BLOCK])
def test_a_softmax_carried_on_has_the_bits_of_one_pass(target: Target, cut: int, rise: float) -> None:
    case, keys = rising(make([(260, 60), (0, 130), (70, 3)], target), rise)
    whole = run(case, keys, target)
    state = AttentionState.empty(sum(case.new), case.heads, NOPE, target.device)
    starts = [sum(case.totals[:seq]) for seq in range(len(case.totals))]
    first = 0
    while first < max(case.totals):
        counts = [min(max(total - first, 0), cut) for total in case.totals]
        rows = torch.cat([torch.arange(s + first, s + first + c) for s, c in zip(starts, counts, strict=True)])
        chunk = tuple(part[rows.to(target.device)] for part in keys)
        offsets = torch.tensor([c - first for c in case.cached], dtype=torch.int32, device=target.device)
        bounds = (case.cu_q, running_sums(counts, target.device), max(case.new))
        options = {"q_offsets": offsets, "backend": target.backend}
        if first + cut < max(case.totals):
            mla_prefill_part(case.q, *chunk, *bounds, state, resumes=first > 0, **options)
        else:
            parts = with_lse(mla_prefill, case.q, *chunk, *bounds, state=state, **options)
        first += cut
    for part, wanted in zip(parts, whole, strict=True):
        if target.backend is Backend.REFERENCE:
            torch.testing.assert_close(part, wanted, atol=1e-2, rtol=0.0)
        else:
            assert_same_bits(part, wanted)


@pytest.mark.parametrize("rise", [0.0, *RISES])
def test_bits_do_not_depend_on_other_requests_or_cuts(target: Target, rise: float) -> None:
    if target.backend is Backend.REFERENCE:
        pytest.skip("a CPU product's last bits depend on its shape")
    case, keys = rising(make([(10, 5), (130, 77), (0, 20)], target), rise)
    out, lse = run(case, keys, target)
    own = slice(15, 15 + 130 + 40)  # the second sequence's keys, as if only 40 of its queries were there
    part = with_lse(
        mla_prefill,
        case.q[5:45],
        *(rows[own] for rows in keys),
        running_sums([40], target.device),
        running_sums([170], target.device),
        40,
        backend=target.backend,
    )
    assert_same_bits(part[0], out[5:45])
    assert_same_bits(part[1], lse[:, 5:45])


# What NumPy says of such a row, in the interpreter.
@pytest.mark.filterwarnings("ignore:All-NaN slice", "ignore:invalid value", "ignore:overflow")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -3e38])
def test_a_query_out_of_range_changes_no_other_row(target: Target, value: float) -> None:
    case = make([(260, 70), (0, 5)], target)
    keys = projected(case)
    whole = run(case, keys, target)
    case.q[33] = value
    got = run(case, keys, target)
    others = [row for row in range(75) if row != 33]
    assert_same_bits(got[0][others], whole[0][others])
    assert_same_bits(got[1][:, others], whole[1][:, others])


def test_an_empty_batch_gives_an_empty_answer(target: Target) -> None:
    case = make([(5, 1)], target)
    q = case.q.new_empty((0, 2, NOPE + ROPE))
    zero = running_sums([0], target.device)
    assert mla_prefill(q, *projected(case), zero, zero, 0, backend=target.backend).shape == (0, 2, NOPE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(3, 2, 128)}, "k_nope: heads must be narrower than q's 128"),
        ({"v": torch.zeros(20, 3, 128)}, "v: shape must be"),
        ({"k_rope": torch.zeros(20, 3, 64)}, "k_rope: shape must be"),
        ({"k_nope": torch.zeros(20, 2, 256)[..., ::2]}, "k_nope: the last axis"),
        ({"scale": 0.0}, "scale: must be positive"),
        ({"max_seqlen_q": -1}, "max_seqlen_q: must not be negative"),
        ({"q_offsets": torch.zeros(1, dtype=torch.int32), "causal": False}, "q_offsets: say which"),
        ({"plan": MlaPrefillPlan(1, 2, device="cpu")}, "plan: holds"),
        ({"state": AttentionState.empty(4, 2, 128, "cpu")}, "state.acc: shape must be"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "q": torch.zeros(3, 2, 192),
        "k_nope": torch.zeros(20, 2, 128),
        "k_rope": torch.zeros(20, 64),
        "v": torch.zeros(20, 2, 128),
        "cu_seqlens_q": running_sums([3]),
        "cu_seqlens_k": running_sums([20]),
        "max_seqlen_q": 3,
    }
    with pytest.raises(KernelArgumentError, match=message):
        mla_prefill(**{**arguments, **change})
