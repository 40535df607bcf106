"""decode_attention's options: several tokens of a sequence, softcap, fp8 pages; and what takes which case."""

from dataclasses import replace

import pytest
import torch

from kernels.attention import with_lse
from kernels.backend import Backend
from kernels.decode_attention import MAX_Q_TOKENS, decode_attention
from kernels.errors import KernelArgumentError
from kernels.fp8 import E4M3
from kernels.layout import KvLayout
from tests.kernels.compare import assert_attention, assert_lse, assert_output, assert_same_bits
from tests.kernels.dense import dense_attention
from tests.kernels.inputs import CaseShape, PagedCase, make_case
from tests.kernels.routes import decode_route
from tests.kernels.target import Target

# (cached, new): new tokens alone, inside a page, across pages, tiles of 64 and splits of 256; none at all.
SPANS = [(0, 1), (0, 8), (13, 5), (60, 8), (252, 8), (0, 0), (300, 3), (255, 1)]


def run(case: PagedCase, target: Target, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    given: dict[str, object] = {
        "cu_seqlens_q": case.cu_seqlens_q,
        "max_q_tokens": MAX_Q_TOKENS,
        "window": case.window,
        "layout": case.layout,
        "backend": target.backend,
    }
    pages = (case.k_pages, case.v_pages, case.block_tables)
    return with_lse(decode_attention, case.q, *pages, case.seqlens_k, **(given | options))


@pytest.mark.parametrize("window", [0, 3, 100])
@pytest.mark.parametrize("layout", list(KvLayout))
def test_tokens_are_causal_among_themselves(target: Target, layout: KvLayout, window: int) -> None:
    case = make_case(SPANS, CaseShape(layout=layout, window=window, device=target.device))
    assert_attention(run(case, target), dense_attention(case))


@pytest.mark.parametrize("group", [1, 7, 16])
def test_groups_of_query_heads(target: Target, group: int) -> None:
    case = make_case([(70, 8), (3, 2)], CaseShape(q_heads=group, kv_heads=1, device=target.device))
    assert_output(run(case, target)[0], dense_attention(case)[0])


@pytest.mark.parametrize("window", [0, 50])
def test_a_token_alone_has_the_same_bits(target: Target, window: int) -> None:
    """A sequence's last token, computed with up to seven others, equals the one that is computed alone."""
    case = make_case(SPANS, CaseShape(window=window, device=target.device))
    sinks = torch.tensor([0.5, -2.0, 3.0, 0.0], device=target.device)
    together, lse = run(case, target, sinks=sinks)
    last = [end - 1 for end, (_, new) in zip(case.cu_seqlens_q.tolist()[1:], case.lengths, strict=True) if new]
    kept = [seq for seq, (_, new) in enumerate(case.lengths) if new]
    alone, alone_lse = with_lse(
        decode_attention,
        case.q[last],
        case.k_pages,
        case.v_pages,
        case.block_tables[kept],
        case.seqlens_k[kept],
        window=window,
        sinks=sinks,
        backend=target.backend,
    )
    assert_same_bits(alone, together[last])
    assert_same_bits(alone_lse, lse[:, last])


@pytest.mark.parametrize("softcap", [1.0, 30.0])
def test_softcap(target: Target, softcap: float) -> None:
    case = make_case(SPANS, CaseShape(device=target.device))
    case = replace(case, q=case.q * 4)
    sinks = torch.tensor([0.5, -2.0, 3.0, 0.0], device=target.device)
    assert_attention(
        run(case, target, softcap=softcap, sinks=sinks), dense_attention(case, sinks=sinks, softcap=softcap)
    )


def widened(case: PagedCase, k_scales: torch.Tensor, v_scales: torch.Tensor) -> PagedCase:
    """The dense keys and values that the codes stand for; scales [1] or [num_pages, heads, page_tokens]."""

    def numbers(seq: int, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        if scales.dim() == 1:
            return codes.float() * scales
        at = torch.arange(codes.shape[0], device=codes.device)
        page = case.block_tables[seq][at // case.page_tokens].long()
        return codes.float() * scales[page, :, at % case.page_tokens].unsqueeze(-1)

    return replace(
        case,
        keys=tuple(numbers(seq, codes, k_scales) for seq, codes in enumerate(case.keys)),
        values=tuple(numbers(seq, codes, v_scales) for seq, codes in enumerate(case.values)),
    )


@pytest.mark.parametrize("layout", list(KvLayout))
@pytest.mark.parametrize("per_token", [False, True])
def test_fp8_pages(target: Target, per_token: bool, layout: KvLayout) -> None:
    case = make_case([(0, 1), (290, 8), (30, 3)], CaseShape(dtype=E4M3, layout=layout, device=target.device))
    rng = torch.Generator().manual_seed(3)
    case = replace(case, q=torch.randn(case.q.shape, generator=rng).to(torch.bfloat16).to(target.device))
    size = (case.k_pages.shape[0], 2, 16) if per_token else (1,)
    k_scales, v_scales = ((torch.rand(size, generator=rng) * 0.5 + 0.5).to(target.device) for _ in range(2))
    assert_attention(
        run(case, target, k_scales=k_scales, v_scales=v_scales), dense_attention(widened(case, k_scales, v_scales))
    )


def test_padding_rows_among_spans(target: Target) -> None:
    """A captured step has more sequences than are alive: length 0, one token each, tables of page 0."""
    case = make_case([(40, 4), (300, 2)], CaseShape(device=target.device))
    padding = torch.zeros(2, dtype=torch.int32, device=target.device)
    padded = replace(
        case,
        q=torch.cat([case.q, torch.full_like(case.q[:2], float("nan"))]),
        block_tables=torch.cat([case.block_tables, torch.zeros_like(case.block_tables)]),
        cu_seqlens_q=torch.cat(
            [case.cu_seqlens_q, case.cu_seqlens_q[-1] + torch.arange(1, 3, device=target.device)]
        ).int(),
        cu_seqlens_k=torch.cat([case.cu_seqlens_k, case.cu_seqlens_k[-1] + padding]),
    )
    out, lse = run(padded, target)
    assert_same_bits(out[:6], run(case, target)[0])
    assert not out[6:].any() and bool((lse[:, 6:] == float("-inf")).all())


def shifted(device: str, dim: int = 64) -> tuple[PagedCase, torch.Tensor, torch.Tensor]:
    """A sequence without a query before and behind each one that has one; queries and output with guard rows behind."""
    case = make_case([(64, 0), (199, 1), (40, 0), (299, 1), (77, 0)], CaseShape(dim=dim, device=device))
    guarded = torch.full((6, *case.q.shape[1:]), 7.0, dtype=case.q.dtype, device=device)
    queries = torch.full_like(guarded, float("nan"))
    queries[:2] = case.q
    return case, queries, guarded


def check_shifted(case: PagedCase, queries: torch.Tensor, guarded: torch.Tensor, backend: Backend) -> None:
    """Rows are where cu_seqlens_q says, have the bits of a call without it, and nothing behind `out` is written.

    Nor is it behind `lse`: the log-sum-exps lie at the head of a larger buffer for that.
    """
    pages, heads = (case.k_pages, case.v_pages), queries.shape[1]
    sums = torch.full((heads * 6,), 7.0, device=queries.device)
    lse = sums[: heads * 2].view(heads, 2)
    decode_attention(
        queries[:2], *pages, case.block_tables, case.seqlens_k,
        cu_seqlens_q=case.cu_seqlens_q, max_q_tokens=1, out=guarded[:2], lse=lse, backend=backend,
    )  # fmt: skip
    alone, alone_lse = with_lse(
        decode_attention,
        queries[:2],
        *pages,
        case.block_tables[1::2].contiguous(),
        case.seqlens_k[1::2].contiguous(),
        backend=backend,
    )
    assert_same_bits(guarded[:2].clone(), alone)
    assert_same_bits(lse, alone_lse)
    assert bool((guarded[2:] == 7.0).all())
    assert bool((sums[heads * 2 :] == 7.0).all())


def test_a_sequence_without_a_query_moves_no_row(target: Target) -> None:
    check_shifted(*shifted(target.device), backend=target.backend)


@pytest.mark.parametrize("window", [0, 50])
def test_sequences_without_tokens_among_others(target: Target, window: int) -> None:
    """First, in the middle and last; the others have the bits that they have without them."""
    spans = [(9, 0), (40, 2), (0, 0), (300, 0), (20, 8), (520, 0)]
    case = make_case(spans, CaseShape(window=window, device=target.device))
    out, lse = run(case, target)
    wanted, wanted_lse = dense_attention(case)
    assert_output(out, wanted)
    assert_lse(lse, wanted_lse)
    kept = [seq for seq, (_, new) in enumerate(spans) if new]
    bounds = torch.tensor([0, 2, 10], dtype=torch.int32, device=target.device)
    others, others_lse = with_lse(
        decode_attention, case.q, case.k_pages, case.v_pages, case.block_tables[kept], case.seqlens_k[kept],
        cu_seqlens_q=bounds, max_q_tokens=MAX_Q_TOKENS, window=window, backend=target.backend,
    )  # fmt: skip
    assert_same_bits(out, others)
    assert_same_bits(lse, others_lse)


def test_counts_of_tokens_are_checked() -> None:
    case = make_case([(10, 3)], CaseShape())
    args = (case.q, case.k_pages, case.v_pages, case.block_tables, case.seqlens_k)
    with pytest.raises(KernelArgumentError, match="max_q_tokens: 3 need cu_seqlens_q, got None"):
        decode_attention(case.q[:1], *args[1:], max_q_tokens=3)
    with pytest.raises(KernelArgumentError, match=r"max_q_tokens: must be in 1\.\.8, got 9"):
        decode_attention(*args, cu_seqlens_q=case.cu_seqlens_q, max_q_tokens=9)
    with pytest.raises(KernelArgumentError, match=r"cu_seqlens_q: shape must be \[2\]|block_tables: shape must be"):
        decode_attention(*args, cu_seqlens_q=case.cu_seqlens_q.repeat(2), max_q_tokens=3)
    with pytest.raises(KernelArgumentError, match="cu_seqlens_q: sequence 0 has 3 tokens, max_q_tokens is 2"):
        decode_attention(*args, cu_seqlens_q=case.cu_seqlens_q, max_q_tokens=2)


def test_a_cpu_takes_the_reference_and_refuses_gluon() -> None:
    case = make_case([(10, 1)], CaseShape())
    assert decode_route(case.q, case.k_pages, case.v_pages) is Backend.REFERENCE
    with pytest.raises(KernelArgumentError, match="backend GLUON: needs a Hopper GPU"):
        decode_attention(case.q, case.k_pages, case.v_pages, case.block_tables, case.seqlens_k, backend=Backend.GLUON)
