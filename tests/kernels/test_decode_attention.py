"""decode_attention against dense attention, and the promise that neither other requests nor bounds change a bit."""

from dataclasses import replace

import pytest
import torch

from kernels.attention import with_lse
from kernels.decode_attention import decode_attention
from kernels.errors import KernelArgumentError
from kernels.layout import KvLayout
from tests.kernels.compare import assert_attention, assert_same_bits
from tests.kernels.dense import dense_attention
from tests.kernels.inputs import CaseShape, PagedCase, make_case, spread_pages
from tests.kernels.target import Target

# Around the splits of 256 keys, the tiles of 64 and the pages of 16.
LENGTHS = [1, 16, 17, 63, 64, 65, 255, 256, 257, 512, 700]


def decoding(lengths: list[int], shape: CaseShape, seed: int = 0) -> PagedCase:
    return make_case([(length - 1, 1) for length in lengths], shape, seed)


def run(
    case: PagedCase, target: Target, scale: float | None = None, max_seqlen_k: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    return with_lse(
        decode_attention,
        case.q,
        case.k_pages,
        case.v_pages,
        case.block_tables,
        case.seqlens_k,
        max_seqlen_k=max_seqlen_k,
        scale=scale,
        window=case.window,
        layout=case.layout,
        backend=target.backend,
    )


def check(case: PagedCase, target: Target, scale: float | None = None) -> None:
    assert_attention(run(case, target, scale), dense_attention(case, scale))


@pytest.mark.parametrize("window", [0, 1, 20, 300])
@pytest.mark.parametrize("layout", list(KvLayout))
def test_ragged_batch_in_every_layout(target: Target, layout: KvLayout, window: int) -> None:
    shape = CaseShape(layout=layout, window=window, shared_pages=0 if window else 3, device=target.device)
    check(decoding(LENGTHS, shape), target)


def test_every_dtype(target: Target) -> None:
    for dtype in target.dtypes:
        check(decoding([5, 300], CaseShape(dtype=dtype, device=target.device)), target)


@pytest.mark.parametrize("page_tokens", [1, 32, 64, 128, 256])
def test_page_sizes(target: Target, page_tokens: int) -> None:
    shape = CaseShape(page_tokens=page_tokens, q_heads=2, kv_heads=1, shared_pages=1, device=target.device)
    check(decoding([3, page_tokens, 2 * page_tokens + 1, 290], shape), target)


@pytest.mark.parametrize("dim", [16, 80, 96, 112, 128, 192, 256])
def test_head_dims(target: Target, dim: int) -> None:
    check(decoding([270], CaseShape(dim=dim, q_heads=2, kv_heads=1, device=target.device)), target)


@pytest.mark.parametrize("group", [1, 3, 7, 8, 16])
def test_groups_of_query_heads(target: Target, group: int) -> None:
    check(decoding([100, 1], CaseShape(q_heads=2 * group, kv_heads=2, device=target.device)), target)


def test_custom_scale_and_given_output(target: Target) -> None:
    case = decoding([90, 20], CaseShape(device=target.device))
    check(case, target, scale=0.31)
    out = torch.empty_like(case.q)
    got = decode_attention(
        case.q, case.k_pages, case.v_pages, case.block_tables, case.seqlens_k, out=out, backend=target.backend
    )
    assert got is out
    assert_same_bits(out, run(case, target)[0])


def test_scores_that_lie_far_apart(target: Target) -> None:
    """Most weights are too small for fp32, and one key takes nearly everything."""
    case = decoding([33, 300], CaseShape(device=target.device))
    check(replace(case, q=case.q * 20), target)


def test_padding_rows_give_zero(target: Target) -> None:
    """A captured batch is padded with rows of length 0 whose tables point at page 0."""
    case = decoding([40, 300], CaseShape(device=target.device))
    tables = torch.cat([case.block_tables, torch.zeros_like(case.block_tables)])
    padded = torch.cat([case.seqlens_k, torch.zeros_like(case.seqlens_k)])
    queries = torch.cat([case.q, torch.full_like(case.q, float("nan"))])
    out, lse = with_lse(decode_attention, queries, case.k_pages, case.v_pages, tables, padded, backend=target.backend)
    assert_same_bits(out[:2], run(case, target)[0])
    assert not out[2:].any() and bool((lse[:, 2:] == float("-inf")).all())


def test_a_pool_beyond_two_billion_elements(target: Target) -> None:
    case = decoding([49, 20], CaseShape(device=target.device))
    assert_same_bits(run(spread_pages(case), target)[0], run(case, target)[0])


def test_empty_batch(target: Target) -> None:
    case = decoding([5], CaseShape(device=target.device))
    out = decode_attention(
        case.q[:0],
        case.k_pages,
        case.v_pages,
        case.block_tables[:0],
        case.seqlens_k[:0],
        backend=target.backend,
    )
    assert out.shape == (0, 4, 64)


@pytest.mark.parametrize("window", [0, 100])
def test_no_mate_and_no_bound_changes_a_bit(target: Target, window: int) -> None:
    case = replace(decoding([700, 1, 257, 64], CaseShape(device=target.device)), window=window)
    together, _ = run(case, target)
    for seq, (cached, new) in enumerate(case.lengths):
        alone = replace(
            case,
            lengths=(case.lengths[seq],),
            q=case.q[seq : seq + 1],
            block_tables=case.block_tables[seq : seq + 1],
            cu_seqlens_k=case.cu_seqlens_k[seq : seq + 2] - case.cu_seqlens_k[seq],
        )
        for bound in (None, cached + new):
            assert_same_bits(run(alone, target, max_seqlen_k=bound)[0], together[seq : seq + 1])


def test_bounds_are_checked() -> None:
    case = decoding([40], CaseShape())
    room = case.block_tables.shape[1] * 16
    with pytest.raises(KernelArgumentError, match=f"max_seqlen_k: must be in 0..{room}"):
        decode_attention(case.q, case.k_pages, case.v_pages, case.block_tables, case.seqlens_k, max_seqlen_k=room + 1)
    with pytest.raises(KernelArgumentError, match="sequence 0 has 40 keys, max_seqlen_k is 39"):
        decode_attention(case.q, case.k_pages, case.v_pages, case.block_tables, case.seqlens_k, max_seqlen_k=39)
