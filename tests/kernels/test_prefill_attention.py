"""prefill_attention against dense attention, and the promise that cutting a prompt changes no bit."""

import random
from dataclasses import replace

import pytest
import torch

from kernels.attention import with_lse
from kernels.errors import KernelArgumentError
from kernels.layout import KvLayout
from kernels.prefill_attention import prefill_attention
from tests.kernels.compare import assert_attention, assert_output, assert_same_bits
from tests.kernels.dense import dense_attention
from tests.kernels.inputs import CaseShape, PagedCase, make_case, running_sums, spread_pages
from tests.kernels.target import REFERENCE, Target

# Cached: nothing, one page, an odd number of pages, inside a page; all mixed, and a sequence without queries.
# A sequence without a new token first, in the middle and last: no row moves.
RAGGED = [(20, 0), (0, 33), (16, 5), (0, 0), (48, 16), (37, 70), (0, 1), (130, 1), (16, 0)]


def run(case: PagedCase, target: Target, scale: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    return with_lse(
        prefill_attention,
        case.q,
        case.k_pages,
        case.v_pages,
        case.block_tables,
        case.cu_seqlens_q,
        case.cu_seqlens_k,
        case.max_seqlen_q,
        scale=scale,
        window=case.window,
        layout=case.layout,
        backend=target.backend,
    )


def check(case: PagedCase, target: Target, scale: float | None = None) -> None:
    assert_attention(run(case, target, scale), dense_attention(case, scale))


@pytest.mark.parametrize("window", [0, 1, 20])
@pytest.mark.parametrize("layout", list(KvLayout))
def test_ragged_batch_in_every_layout(target: Target, layout: KvLayout, window: int) -> None:
    shape = CaseShape(layout=layout, window=window, shared_pages=0 if window else 2, device=target.device)
    check(make_case(RAGGED, shape), target)


def test_every_dtype(target: Target) -> None:
    for dtype in target.dtypes:
        check(make_case(RAGGED, CaseShape(dtype=dtype, shared_pages=1, device=target.device)), target)


@pytest.mark.parametrize("page_tokens", [1, 16, 32, 64, 128, 256])
def test_page_sizes(target: Target, page_tokens: int) -> None:
    lengths = [(0, 40), (page_tokens, 9), (3 * page_tokens, 2), (page_tokens + page_tokens // 2, 30)]
    shape = CaseShape(page_tokens=page_tokens, q_heads=2, kv_heads=1, shared_pages=1, device=target.device)
    check(make_case(lengths, shape), target)


@pytest.mark.parametrize("dim", [16, 64, 80, 96, 112, 128, 192, 256])
def test_head_dims(target: Target, dim: int) -> None:
    check(make_case([(21, 45)], CaseShape(dim=dim, q_heads=2, kv_heads=1, device=target.device)), target)


@pytest.mark.parametrize("group", [1, 2, 3, 7, 8, 16])
def test_groups_of_query_heads(target: Target, group: int) -> None:
    lengths = [(19, 40), (0, 3)]
    check(make_case(lengths, CaseShape(q_heads=2 * group, kv_heads=2, device=target.device)), target)


def test_custom_scale_and_given_output(target: Target) -> None:
    case = make_case([(16, 20)], CaseShape(device=target.device))
    check(case, target, scale=0.31)
    fused = torch.zeros(20, 6, 64, dtype=case.q.dtype, device=target.device)
    out = prefill_attention(
        case.q,
        case.k_pages,
        case.v_pages,
        case.block_tables,
        case.cu_seqlens_q,
        case.cu_seqlens_k,
        20,
        out=fused[:, :4],
        backend=target.backend,
    )
    assert out.data_ptr() == fused.data_ptr()
    assert_same_bits(fused[:, :4], run(case, target)[0])
    assert not fused[:, 4:].any()


def test_queries_may_be_slices_of_a_fused_projection(target: Target) -> None:
    case = make_case([(5, 11)], CaseShape(device=target.device))
    fused = torch.full((11, 9, 64), float("nan"), dtype=case.q.dtype, device=target.device)
    fused[:, 2:6] = case.q
    assert_same_bits(run(replace(case, q=fused[:, 2:6]), target)[0], run(case, target)[0])


def test_causality_is_bottom_right(target: Target) -> None:
    """3 cached and 2 new tokens: the queries see 4 and 5 keys. Equal scores make an output the mean of what it saw."""
    case = make_case([(3, 2)], CaseShape(q_heads=1, kv_heads=1, dim=16, device=target.device))
    page = int(case.block_tables[0, 0])
    case.v_pages[page, :5, 0] = torch.eye(5, 16, dtype=case.q.dtype, device=target.device)
    out, lse = run(replace(case, q=torch.zeros_like(case.q)), target)
    wanted = torch.zeros(2, 16)
    wanted[0, :4], wanted[1, :5] = 1 / 4, 1 / 5
    torch.testing.assert_close(out[:, 0].float().cpu(), wanted, atol=1e-3, rtol=0.0)
    torch.testing.assert_close(lse[0].cpu(), torch.tensor([4.0, 5.0]).log(), atol=1e-5, rtol=0.0)


def test_window_of_one_returns_the_token_itself(target: Target) -> None:
    case = make_case([(40, 3)], CaseShape(window=1, q_heads=2, kv_heads=2, device=target.device))
    assert_same_bits(run(case, target)[0], case.values[0][40:])


def test_a_pool_beyond_two_billion_elements(target: Target) -> None:
    case = make_case([(40, 9), (0, 20)], CaseShape(device=target.device))
    assert_same_bits(run(spread_pages(case), target)[0], run(case, target)[0])


def test_empty_batches(target: Target) -> None:
    case = make_case([(16, 0), (0, 0)], CaseShape(device=target.device))
    out, lse = run(case, target)
    assert out.shape == (0, 4, 64) and lse.shape == (4, 0)
    none = replace(
        case, lengths=((0, 0),), block_tables=case.block_tables[:0], cu_seqlens_q=running_sums([], target.device)
    )
    assert run(replace(none, cu_seqlens_k=none.cu_seqlens_q), target)[0].numel() == 0


def cut(case: PagedCase, cuts: list[int], mate: PagedCase, target: Target) -> torch.Tensor:
    """The sequence's outputs, computed chunk after chunk, each chunk behind another sequence of the batch."""
    offset = case.k_pages.shape[0]
    k_pages, v_pages = torch.cat([case.k_pages, mate.k_pages]), torch.cat([case.v_pages, mate.v_pages])
    total, outs = case.lengths[0][1], []
    width = max(case.block_tables.shape[1], mate.block_tables.shape[1])
    tables = torch.zeros(2, width, dtype=torch.int32, device=target.device)
    tables[0, : mate.block_tables.shape[1]] = mate.block_tables[0] + offset
    tables[1, : case.block_tables.shape[1]] = case.block_tables[0]
    mate_total, mate_new = int(mate.seqlens_k[0]), mate.q.shape[0]
    for start, stop in zip([0, *cuts], [*cuts, total], strict=True):
        out = prefill_attention(
            torch.cat([mate.q, case.q[start:stop]]),
            k_pages,
            v_pages,
            tables,
            running_sums([mate_new, stop - start], target.device),
            running_sums([mate_total, stop], target.device),
            max(mate_new, stop - start),
            window=case.window,
            backend=target.backend,
        )
        outs.append(out[mate_new:])
    return torch.cat(outs)


@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize("cuts", [[16], [77], [1, 2, 3, 100], [64, 128]])
def test_no_cut_and_no_mate_changes_a_bit(target: Target, cuts: list[int], window: int) -> None:
    shape = CaseShape(q_heads=4, kv_heads=1, dim=64, device=target.device)
    case = replace(make_case([(0, 150)], shape), window=window)
    mate = make_case([(23, 40)], shape, seed=1)
    whole, _ = run(case, target)
    assert_same_bits(cut(case, cuts, mate, target), whole)


@pytest.mark.parametrize("cuts", [[16], [1, 2, 3, 100]])
def test_no_cut_of_fp32_changes_a_bit(cuts: list[int], target: Target) -> None:
    """A CPU worker serves in fp32: its greedy tokens must not depend on its chunks."""
    if target.dtypes[-1] is not torch.float32:
        pytest.skip("fp32 is not computed on tensor cores")
    shape = CaseShape(dtype=torch.float32, kv_heads=1)
    case, mate = make_case([(0, 150)], shape), make_case([(23, 40)], shape, seed=1)
    assert_same_bits(cut(case, cuts, mate, target), run(case, target)[0])


@pytest.mark.parametrize("seed", range(12))
def test_no_random_cut_of_a_long_prompt_changes_a_bit_of_the_reference(seed: int) -> None:
    """Over several wide tiles of keys, for shapes that no product was tuned for."""
    rng = random.Random(seed)
    kv_heads = rng.choice([1, 2, 3])
    shape = CaseShape(
        page_tokens=rng.choice([1, 16, 64]),
        q_heads=kv_heads * rng.choice([1, 2, 3, 7]),
        kv_heads=kv_heads,
        dim=rng.choice([64, 80, 128]),
        dtype=rng.choice([torch.float32, torch.bfloat16]),
    )
    total = rng.randint(1100, 2600)
    case = replace(make_case([(0, total)], shape, seed), window=rng.choice([0, 0, 1, 300, 1500]))
    mate = make_case([(23, 40)], shape, seed=1)
    cuts = sorted(rng.sample(range(1, total), rng.randint(1, 5)))
    assert_same_bits(cut(case, cuts, mate, REFERENCE), run(case, REFERENCE)[0])


def test_scores_that_lie_far_apart(target: Target) -> None:
    """Most weights are too small for fp32, and one key takes nearly everything."""
    case = make_case([(0, 33), (300, 20)], CaseShape(device=target.device))
    check(replace(case, q=case.q * 20), target)


@pytest.mark.gpu
def test_more_than_a_thousand_sequences() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    case = make_case([(i % 40, 1 + i % 3) for i in range(1500)], CaseShape(device="cuda"))
    out = prefill_attention(
        case.q, case.k_pages, case.v_pages, case.block_tables, case.cu_seqlens_q, case.cu_seqlens_k, case.max_seqlen_q
    )
    assert_output(out, dense_attention(case)[0])


def test_reference_refuses_lengths_that_contradict_each_other() -> None:
    case = make_case([(4, 6)], CaseShape())
    args = (case.q, case.k_pages, case.v_pages, case.block_tables)
    with pytest.raises(KernelArgumentError, match=r"6 queries \(max_seqlen_q 5\)"):
        prefill_attention(*args, case.cu_seqlens_q, case.cu_seqlens_k, 5)
    with pytest.raises(KernelArgumentError, match="5 keys"):
        prefill_attention(*args, case.cu_seqlens_q, running_sums([5]), 6)
