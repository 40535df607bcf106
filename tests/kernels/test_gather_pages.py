"""gather_pages and scatter_pages: exact bytes, whatever the layout, the raggedness and the page size."""

import pytest
import torch

from kernels.errors import KernelArgumentError
from kernels.gather_pages import gather_pages, scatter_pages
from kernels.layout import KvLayout, PageShape
from tests.kernels.compare import assert_same_bits
from tests.kernels.inputs import CaseShape, PagedCase, make_case, poisoned_pages, running_sums
from tests.kernels.target import Target

RAGGED = [(0, 0), (16, 1), (0, 7), (0, 0), (30, 19), (64, 0), (0, 0)]


def gather(case: PagedCase, target: Target) -> tuple[torch.Tensor, torch.Tensor]:
    return gather_pages(
        case.k_pages,
        case.v_pages,
        case.block_tables,
        case.cu_seqlens_k,
        case.total_tokens,
        layout=case.layout,
        backend=target.backend,
    )


def check_round_trip(case: PagedCase, target: Target) -> None:
    """Gather gives the dense tokens; scattering them over poison gives the pages back, unused memory included."""
    k, v = gather(case, target)
    assert_same_bits(k, torch.cat(case.keys))
    assert_same_bits(v, torch.cat(case.values))
    fresh_k, fresh_v = torch.full_like(case.k_pages, float("nan")), torch.full_like(case.v_pages, float("nan"))
    scatter_pages(
        k, v, fresh_k, fresh_v, case.block_tables, case.cu_seqlens_k, layout=case.layout, backend=target.backend
    )
    assert_same_bits(fresh_k, case.k_pages)
    assert_same_bits(fresh_v, case.v_pages)


@pytest.mark.parametrize("layout", list(KvLayout))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_ragged_batch_in_every_layout(target: Target, dtype: torch.dtype, layout: KvLayout) -> None:
    shape = CaseShape(dtype=dtype, layout=layout, dim=80, shared_pages=1, device=target.device)
    check_round_trip(make_case(RAGGED, shape), target)


@pytest.mark.parametrize("dim", [64, 128, 192, 512])
@pytest.mark.parametrize("page_tokens", [1, 16, 64, 256])
def test_page_sizes_and_dims(target: Target, page_tokens: int, dim: int) -> None:
    lengths = [(page_tokens, 1), (0, 3)]
    shape = CaseShape(page_tokens=page_tokens, dim=dim, kv_heads=1, device=target.device)
    check_round_trip(make_case(lengths, shape), target)


def test_wide_rows(target: Target) -> None:
    check_round_trip(make_case([(5, 4)], CaseShape(kv_heads=40, q_heads=40, dim=128, device=target.device)), target)


def test_rows_written_out_by_hand(target: Target) -> None:
    """Tables [[5, 2], [3, 0]], lengths 3 and 0 and 1, pages of 2: page 5 whole, page 2's first slot, page 3's first."""
    k_pages = torch.arange(6 * 2).view(6, 2, 1, 1).expand(6, 2, 1, 4).to(torch.bfloat16).contiguous().to(target.device)
    tables = torch.tensor([[5, 2], [0, 0], [3, 0]], dtype=torch.int32, device=target.device)
    k, v = gather_pages(k_pages, -k_pages, tables, running_sums([3, 0, 1], target.device), 4, backend=target.backend)
    assert k[:, 0, 0].tolist() == [10.0, 11.0, 4.0, 6.0]
    assert v[:, 0, 3].tolist() == [-10.0, -11.0, -4.0, -6.0]


def test_nothing_to_gather(target: Target) -> None:
    case = make_case([(0, 0), (0, 0)], CaseShape(device=target.device))
    k, v = gather(case, target)
    assert k.shape == v.shape == (0, 2, 64)
    scatter_pages(k, v, case.k_pages, case.v_pages, case.block_tables, case.cu_seqlens_k, backend=target.backend)
    assert case.k_pages.isnan().all()


def test_many_sequences(target: Target) -> None:
    """The search for a token's sequence at both ends of a batch that is not a power of two."""
    check_round_trip(
        make_case([(i % 3, i % 2) for i in range(67)], CaseShape(kv_heads=1, device=target.device)), target
    )


def test_a_pool_beyond_two_billion_elements(target: Target) -> None:
    """Page 58,255 of pages of 64 x 576 elements starts past 2^31; memory between the pages is never touched."""
    page = 64 * 576
    k_pool = torch.empty(58_256 * page, dtype=torch.float16, device=target.device)
    token = torch.arange(576, dtype=torch.float16, device=target.device)
    k_pool[58_255 * page : 58_255 * page + 576] = token
    tables = torch.tensor([[58_255]], dtype=torch.int32, device=target.device)
    k_pages = k_pool.view(58_256, 64, 1, 576)
    k, _ = gather_pages(k_pages, k_pages, tables, running_sums([1], target.device), 1, backend=target.backend)
    assert_same_bits(k[0, 0], token)


def test_layouts_of_one_token() -> None:
    """Where the definition puts element d = 9 of head 1 in slot 10 of page 2, x = 8."""
    shape = PageShape(3, 16, 2, 16)
    for layout, k_place, v_place in (
        (KvLayout.NHD, (2, 10, 1, 9), (2, 10, 1, 9)),
        (KvLayout.HND, (2, 1, 10, 9), (2, 1, 10, 9)),
        (KvLayout.SHUFFLE, (2, 1, 1, 10, 1), (2, 1, 1, 9, 2)),
    ):
        k_pages, v_pages = poisoned_pages(shape, torch.bfloat16, layout)
        k_pages[k_place], v_pages[v_place] = 3.0, 4.0
        tables = torch.tensor([[2]], dtype=torch.int32)
        k, v = gather_pages(k_pages, v_pages, tables, running_sums([11]), 11, layout=layout)
        assert k[10, 1, 9].item() == 3.0 and v[10, 1, 9].item() == 4.0


def test_a_wrong_total_is_refused() -> None:
    case = make_case([(3, 2)], CaseShape())
    with pytest.raises(KernelArgumentError, match="total_tokens: cu_seqlens_k ends at 5, got 6"):
        gather_pages(case.k_pages, case.v_pages, case.block_tables, case.cu_seqlens_k, 6)
