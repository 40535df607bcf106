"""Attention sinks: one more logit in every row's softmax, counted once, whatever is cached, split or windowed."""

from dataclasses import replace

import pytest
import torch

from kernels.attention import with_lse
from kernels.decode_attention import decode_attention
from kernels.prefill_attention import prefill_attention
from tests.kernels.compare import assert_attention, assert_same_bits
from tests.kernels.conftest import rarely_interpreted
from tests.kernels.dense import dense_attention
from tests.kernels.inputs import CaseShape, PagedCase, make_case, running_sums
from tests.kernels.target import Target

# Weak, equal to a usual score, strong enough to take nearly all of a row, and none at all.
SINKS = [-4.0, 0.5, 9.0, float("-inf")]
LENGTHS = [1, 17, 64, 256, 257, 600]
TOTAL, PAGE = 150, 16


def sinks_for(target: Target, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(SINKS, dtype=dtype, device=target.device)


def prefill(case: PagedCase, sinks: torch.Tensor | None, target: Target) -> tuple[torch.Tensor, torch.Tensor]:
    pages = (case.k_pages, case.v_pages, case.block_tables)
    return with_lse(
        prefill_attention,
        case.q,
        *pages,
        case.cu_seqlens_q,
        case.cu_seqlens_k,
        case.max_seqlen_q,
        window=case.window,
        sinks=sinks,
        layout=case.layout,
        backend=target.backend,
    )


def decode(case: PagedCase, sinks: torch.Tensor | None, target: Target) -> tuple[torch.Tensor, torch.Tensor]:
    return with_lse(
        decode_attention,
        case.q,
        case.k_pages,
        case.v_pages,
        case.block_tables,
        case.seqlens_k,
        window=case.window,
        sinks=sinks,
        layout=case.layout,
        backend=target.backend,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [0, 1, 20])
def test_prefill(target: Target, window: int, dtype: torch.dtype) -> None:
    """Cached: nothing, one page, an odd number of pages, inside a page; with and without in one batch."""
    lengths = [(0, 33), (PAGE, 5), (3 * PAGE, 16), (37, 70), (0, 1)]
    case = make_case(lengths, CaseShape(window=window, device=target.device))
    sinks = sinks_for(target, dtype)
    assert_attention(prefill(case, sinks, target), dense_attention(case, sinks=sinks))


@pytest.mark.parametrize(
    ("window", "dtype"),
    [
        (0, torch.float32), (1, torch.bfloat16), (300, torch.float32), rarely_interpreted(0, torch.bfloat16),
        rarely_interpreted(1, torch.float32), rarely_interpreted(300, torch.bfloat16),
    ],
    ids=str,
)  # fmt: skip
def test_decode(target: Target, window: int, dtype: torch.dtype) -> None:
    """Of the lengths, some have one split and some have several: a sink per split would show."""
    case = make_case([(length - 1, 1) for length in LENGTHS], CaseShape(window=window, device=target.device))
    sinks = sinks_for(target, dtype)
    assert_attention(decode(case, sinks, target), dense_attention(case, sinks=sinks))


def test_by_hand(target: Target) -> None:
    """Two keys of score 0 and a sink of ln 2: each key has a quarter, the sink the half that nobody gets."""
    case = make_case([(1, 1)], CaseShape(q_heads=1, kv_heads=1, dim=16, device=target.device))
    case = replace(case, q=torch.zeros_like(case.q))
    case.v_pages[int(case.block_tables[0, 0]), :2, 0] = torch.eye(2, 16, dtype=case.q.dtype, device=target.device)
    sinks = torch.tensor([2.0], device=target.device).log()
    for out, lse in (prefill(case, sinks, target), decode(case, sinks, target)):
        assert out[0, 0].tolist() == [0.25, 0.25] + [0.0] * 14
        torch.testing.assert_close(lse.cpu(), torch.tensor([[4.0]]).log(), atol=1e-5, rtol=0.0)


def test_a_sink_of_minus_infinity_is_none(target: Target) -> None:
    none = torch.full((4,), float("-inf"), device=target.device)
    ragged = make_case([(0, 33), (37, 20)], CaseShape(device=target.device))
    single = make_case([(299, 1), (4, 1)], CaseShape(device=target.device))
    for run, case in ((prefill, ragged), (decode, single)):
        for got, wanted in zip(run(case, none, target), run(case, None, target), strict=True):
            assert_same_bits(got, wanted)


def test_padding_rows_have_no_sink(target: Target) -> None:
    case = make_case([(40, 1)], CaseShape(device=target.device))
    padded = replace(case, cu_seqlens_k=running_sums([0], target.device))
    out, lse = decode(padded, sinks_for(target), target)
    assert not out.any() and bool((lse == float("-inf")).all())


def cached_and_new(case: PagedCase, cached: int, target: Target) -> PagedCase:
    """The same prompt with `cached` tokens done before, behind an uncached prompt of its own pages."""
    mate = make_case([(0, 21)], CaseShape(window=case.window, device=target.device), seed=1)
    mate_table = mate.block_tables + case.k_pages.shape[0]
    width = case.block_tables.shape[1]
    tables = torch.zeros(2, width, dtype=torch.int32, device=target.device)
    tables[0, : mate_table.shape[1]], tables[1] = mate_table[0], case.block_tables[0]
    new = TOTAL - cached
    return replace(
        case,
        lengths=((0, 21), (cached, new)),
        q=torch.cat([mate.q, case.q[cached:]]),
        k_pages=torch.cat([case.k_pages, mate.k_pages]),
        v_pages=torch.cat([case.v_pages, mate.v_pages]),
        block_tables=tables,
        cu_seqlens_q=running_sums([21, new], target.device),
        cu_seqlens_k=running_sums([21, TOTAL], target.device),
    )


@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize("cached", [0, PAGE, 3 * PAGE, 37])
def test_cached_prefix_equals_single_shot(target: Target, cached: int, window: int) -> None:
    case = make_case([(0, TOTAL)], CaseShape(window=window, device=target.device))
    sinks = sinks_for(target)
    whole, whole_lse = prefill(case, sinks, target)
    out, lse = prefill(cached_and_new(case, cached, target), sinks, target)
    assert_same_bits(out[21:], whole[cached:])
    assert_same_bits(lse[:, 21:], whole_lse[:, cached:])
