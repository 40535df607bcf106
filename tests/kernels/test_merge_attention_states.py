"""merge_attention_states: the two halves of a set of keys give what the whole gives, and empty sides cost nothing."""

import pytest
import torch

from kernels.attention import with_lse
from kernels.merge_attention_states import merge_attention_states
from kernels.prefill_attention import prefill_attention
from tests.kernels.compare import assert_attention, assert_lse, assert_output, assert_same_bits
from tests.kernels.dense import dense_attention
from tests.kernels.inputs import CaseShape, make_case, running_sums
from tests.kernels.target import Target

TOKENS, HEADS, DIM = 5, 3, 80
INF = float("inf")

State = tuple[torch.Tensor, torch.Tensor]


def random_state(target: Target, seed: int, dtype: torch.dtype = torch.float32) -> State:
    rng = torch.Generator().manual_seed(seed)
    out = torch.randn(TOKENS, HEADS, DIM, generator=rng).to(dtype).to(target.device)
    return out, (torch.randn(HEADS, TOKENS, generator=rng) * 4).to(target.device)


def empty_state(target: Target, marker: float, dtype: torch.dtype = torch.float32) -> State:
    """What a side that saw no key may hold: anything."""
    out = torch.full((TOKENS, HEADS, DIM), float("nan"), dtype=dtype, device=target.device)
    return out, torch.full((HEADS, TOKENS), marker, device=target.device)


def merge(a: State, b: State, target: Target) -> State:
    return merge_attention_states(*a, *b, backend=target.backend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("marker", [-INF, INF])
def test_one_empty_side_leaves_the_other_unchanged(target: Target, marker: float, dtype: torch.dtype) -> None:
    full, empty = random_state(target, 0, dtype), empty_state(target, marker, dtype)
    for out, lse in (merge(full, empty, target), merge(empty, full, target)):
        assert_same_bits(out, full[0])
        assert_same_bits(lse, full[1])


@pytest.mark.parametrize(("marker_a", "marker_b"), [(-INF, -INF), (INF, -INF), (-INF, INF), (INF, INF)])
def test_two_empty_sides_give_zero(target: Target, marker_a: float, marker_b: float) -> None:
    out, lse = merge(empty_state(target, marker_a), empty_state(target, marker_b), target)
    assert not out.any() and bool((lse == -INF).all())


def test_empty_rows_among_full_ones(target: Target) -> None:
    """A short sequence may own no token in a chunk that other requests attend to."""
    (out_a, lse_a), (out_b, lse_b) = random_state(target, 0), random_state(target, 1)
    out_a[1], lse_a[:, 1] = float("nan"), -INF
    out_b[2, 0], lse_b[0, 2] = float("nan"), INF
    out, lse = merge((out_a, lse_a), (out_b, lse_b), target)
    assert torch.isfinite(out).all() and torch.isfinite(lse).all()
    assert_same_bits(out[1], out_b[1])
    assert_same_bits(out[2, 0], out_a[2, 0])


def test_weights_are_shares_of_the_exponentials(target: Target) -> None:
    (out_a, lse_a), (out_b, lse_b) = random_state(target, 2), random_state(target, 3)
    out, lse = merge((out_a, lse_a), (out_b, lse_b), target)
    mass_a, mass_b = lse_a.double().exp(), lse_b.double().exp()
    share = (mass_a / (mass_a + mass_b)).T.unsqueeze(-1)
    assert_output(out, out_a * share + out_b * (1 - share))
    assert_lse(lse, (mass_a + mass_b).log())


def test_far_apart_sides_do_not_overflow(target: Target) -> None:
    (out_a, lse_a), (out_b, lse_b) = random_state(target, 4), random_state(target, 5)
    out, lse = merge((out_a, lse_a + 3e4), (out_b, lse_b - 3e4), target)
    assert_same_bits(out, out_a)
    assert_same_bits(lse, lse_a + 3e4)


def test_three_way_merge_in_either_order(target: Target) -> None:
    a, b, c = (random_state(target, seed) for seed in (6, 7, 8))
    left, right = merge(merge(a, b, target), c, target), merge(a, merge(b, c, target), target)
    torch.testing.assert_close(left[0], right[0], atol=1e-5, rtol=0.0)
    torch.testing.assert_close(left[1], right[1], atol=1e-5, rtol=0.0)


def test_prefix_and_rest_give_the_whole(target: Target) -> None:
    """The last token sees 40 keys: the 32 before, attended by a query that stands at 31, and a window of the last 8."""
    case = make_case([(39, 1)], CaseShape(device=target.device))
    tables, one = case.block_tables, running_sums([1], target.device)

    def attend(length: int, window: int) -> State:
        keys = running_sums([length], target.device)
        pages = (case.k_pages, case.v_pages, tables)
        return with_lse(prefill_attention, case.q, *pages, one, keys, 1, window=window, backend=target.backend)

    assert_attention(merge(attend(32, 0), attend(40, 8), target), dense_attention(case))


def test_no_tokens(target: Target) -> None:
    out, lse = random_state(target, 9)
    merged, merged_lse = merge((out[:0], lse[:, :0].contiguous()), (out[:0], lse[:, :0].contiguous()), target)
    assert merged.shape == (0, HEADS, DIM) and merged_lse.shape == (HEADS, 0)
