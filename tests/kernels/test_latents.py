"""gather_latent: exact rows, cached before new, in the order of their sequences."""

from dataclasses import dataclass

import pytest
import torch

from kernels.errors import KernelArgumentError
from kernels.gather_latent import gather_latent
from tests.kernels.compare import assert_same_bits
from tests.kernels.conftest import INTERPRETING
from tests.kernels.inputs import running_sums
from tests.kernels.target import Target

WIDTH = 512 + 64
# Cached and new tokens of each sequence, as in H25 of docs/cases.md: nothing cached, one of each, lengths at and
# around a page's 64 tokens, sequences with nothing cached among others.
BATCHES = [
    [(0, 17)],
    [(13, 1)],
    [(197, 9)],
    [(128, 7)],
    [(8, 4)] * 4,
    [(0, 5), (33, 7), (0, 11), (65, 3)],
    [(323, 16), (2, 1), (128, 8), (0, 12)],
    [(0, 8), (17, 3), (64, 16), (129, 1), (5, 12), (0, 4), (64, 9), (286, 7)],
    [(66, 6), (7, 6), (145, 6), (40, 6)],
    [(1, 1)],
]


# Rows move as bytes: the interpreter, which is slow, need not move them twice.
DTYPES = [torch.bfloat16] if INTERPRETING else [torch.bfloat16, torch.float16]


@dataclass(frozen=True, slots=True)
class Case:
    """Cached rows in poisoned pages, new rows beside them, and what the gathered rows must be."""

    pages: torch.Tensor
    tables: torch.Tensor
    cu_k: torch.Tensor
    cu_q: torch.Tensor
    new: torch.Tensor
    wanted: torch.Tensor


def make(
    lengths: list[tuple[int, int]], device: str, page_tokens: int = 64, dtype: torch.dtype = torch.bfloat16
) -> Case:
    rng = torch.Generator().manual_seed(0)
    rows = [torch.randn(cached + new, WIDTH, generator=rng).to(dtype) for cached, new in lengths]
    counts = [-(-cached // page_tokens) for cached, _ in lengths]
    order = torch.randperm(sum(counts), generator=rng).int() + 1
    pages = torch.full((sum(counts) + 1, page_tokens, WIDTH), float("nan"), dtype=dtype)
    tables, taken = torch.zeros(len(lengths), max([*counts, 1]) + 1, dtype=torch.int32), 0
    for seq, ((cached, _), count) in enumerate(zip(lengths, counts, strict=True)):
        tables[seq, :count] = order[taken : taken + count]
        taken += count
        position = torch.arange(cached)
        pages[tables[seq].long()[position // page_tokens], position % page_tokens] = rows[seq][:cached]
    return Case(
        pages.to(device),
        tables.to(device),
        running_sums([cached + new for cached, new in lengths], device),
        running_sums([new for _, new in lengths], device),
        torch.cat([r[cached:] for r, (cached, _) in zip(rows, lengths, strict=True)]).to(device),
        torch.cat(rows).to(device),
    )


def gather(case: Case, target: Target) -> torch.Tensor:
    total = case.wanted.shape[0]
    return gather_latent(case.pages, case.tables, case.cu_k, total, case.new, case.cu_q, backend=target.backend)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", BATCHES, ids=str)
def test_cached_then_new(target: Target, lengths: list[tuple[int, int]], dtype: torch.dtype) -> None:
    case = make(lengths, target.device, dtype=dtype)
    assert_same_bits(gather(case, target), case.wanted)


@pytest.mark.parametrize("page_tokens", [1, 16, 256])
def test_page_sizes(target: Target, page_tokens: int) -> None:
    case = make(BATCHES[5], target.device, page_tokens)
    assert_same_bits(gather(case, target), case.wanted)


def by_hand(device: str) -> torch.Tensor:
    """cache[p, 0, o, d] = 1000 p + 100 o + d, two tokens a page, rows of 4 + 2."""
    page, slot, d = torch.meshgrid(torch.arange(6), torch.arange(2), torch.arange(6), indexing="ij")
    return (1000.0 * page + 100.0 * slot + d).to(device)


def test_rows_written_out_by_hand(target: Target) -> None:
    pages, d = by_hand(target.device), torch.arange(6.0, device=target.device)
    tables = torch.tensor([[5, 2], [0, 0]], dtype=torch.int32, device=target.device)
    new = -1 - torch.arange(36.0, device=target.device).view(6, 6)
    cu_k, cu_q = running_sums([5, 4], target.device), running_sums([2, 4], target.device)
    got = gather_latent(pages, tables, cu_k, 9, new, cu_q, backend=target.backend)
    cached = torch.stack([5000 + d, 5100 + d, 2000 + d])
    assert_same_bits(got, torch.cat([cached, new]))


def test_all_cached_and_nothing_cached(target: Target) -> None:
    pages, d = by_hand(target.device), torch.arange(6.0, device=target.device)
    table = torch.tensor([[3, 1]], dtype=torch.int32, device=target.device)
    wanted = torch.stack([3000 + d, 3100 + d, 1000 + d, 1100 + d])
    cu_k, none = running_sums([4], target.device), running_sums([0], target.device)
    assert_same_bits(gather_latent(pages, table, cu_k, 4, backend=target.backend), wanted)
    empty = pages.new_empty(0, 6)
    assert_same_bits(gather_latent(pages, table, cu_k, 4, empty, none, backend=target.backend), wanted)
    new = torch.rand(5, 6, device=target.device)
    sums = running_sums([2, 1, 2], target.device)
    assert gather_latent(pages, None, sums, 5, new, sums, backend=target.backend) is new
    out = torch.full_like(new, float("nan"))
    assert gather_latent(pages, None, sums, 5, new, sums, out=out, backend=target.backend) is out
    assert_same_bits(out, new)


def test_no_rows(target: Target) -> None:
    pages = by_hand(target.device)
    none = running_sums([0, 0], target.device)
    assert gather_latent(pages, None, none, 0, backend=target.backend).shape == (0, 6)
    empty = pages.new_empty(0, 6)
    assert gather_latent(pages, None, none, 0, empty, none, backend=target.backend).shape == (0, 6)


def test_a_context_in_chunks(target: Target) -> None:
    """Chunks of 48 positions of every sequence; a short one owns nothing in the later chunks."""
    lengths = [(100, 0), (30, 0), (0, 0), (150, 0)]
    case = make(lengths, target.device, page_tokens=16)
    bounds = case.cu_k.tolist()
    for start in range(0, 150, 48):
        owned = [min(max(cached - start, 0), 48) for cached, _ in lengths]
        first = torch.full((4,), start, dtype=torch.int32, device=target.device)
        total = sum(owned)
        sums = running_sums(owned, target.device)
        got = gather_latent(case.pages, case.tables, sums, total, first_positions=first, backend=target.backend)
        spans = [case.wanted[at + start : at + start + n] for at, n in zip(bounds, owned, strict=False)]
        assert_same_bits(got, torch.cat(spans))


def test_a_total_that_is_only_a_bound(target: Target) -> None:
    case = make(BATCHES[5], target.device)
    total = case.wanted.shape[0]
    out = torch.full((total + 9, WIDTH), float("nan"), dtype=case.pages.dtype, device=target.device)
    args = (case.pages, case.tables, case.cu_k, total + 9, case.new, case.cu_q)
    gather_latent(*args, out=out, backend=target.backend)
    assert_same_bits(out[:total], case.wanted)
    assert out[total:].isnan().all()


def test_a_pool_beyond_two_billion_elements(target: Target) -> None:
    """Page 58,255 of pages of 64 x 576 elements starts past 2^31; memory between the pages is never touched."""
    pool = torch.empty(58_256, 64, WIDTH, dtype=torch.float16, device=target.device)
    row = torch.arange(WIDTH, dtype=torch.float16, device=target.device).view(1, WIDTH)
    pool[58_255, :3] = 0.0
    pool[58_255, 3] = row[0]
    tables = torch.tensor([[58_255]], dtype=torch.int32, device=target.device)
    got = gather_latent(pool, tables, running_sums([4], target.device), 4, backend=target.backend)
    assert_same_bits(got[3], row[0])


PAGES = torch.zeros(4, 16, 8)
ROWS, SUMS = torch.zeros(3, 8), running_sums([3])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pages": PAGES[0]}, r"pages: shape must be \[any, any, any\]"),
        ({"pages": PAGES.double()}, "pages: dtype must be one of"),
        ({"pages": PAGES[..., ::2]}, "pages: a page must be dense"),
        ({"cu_seqlens_k": SUMS.long()}, "cu_seqlens_k: dtype must be"),
        ({"total_tokens": -1}, "total_tokens: must not be negative, got -1"),
        ({"total_tokens": 2}, "total_tokens: 3 rows are new, got 2"),
        ({"new_latents": None}, "new_latents: new rows and their lengths come together, got None"),
        ({"cu_seqlens_q": None}, "cu_seqlens_q: new rows and their lengths come together, got None"),
        ({"new_latents": ROWS[:, :7]}, r"new_latents: shape must be \[any, 8\], got \[3, 7\]"),
        ({"cu_seqlens_q": running_sums([1, 2])}, r"cu_seqlens_q: shape must be \[2\], got \[3\]"),
        ({"block_tables": None}, "block_tables: cached tokens cannot be found without one, got None"),
        ({"block_tables": torch.zeros(2, 1, dtype=torch.int32)}, r"block_tables: shape must be \[1, any\]"),
        ({"first_positions": SUMS}, r"first_positions: shape must be \[1\], got \[2\]"),
        ({"out": torch.zeros(5, 7)}, r"out: shape must be \[5, 8\], got \[5, 7\]"),
        ({"out": PAGES.view(-1, 8)[:5]}, "out: shares memory with pages"),
    ],
)
def test_what_gather_refuses(change: dict[str, object], message: str) -> None:
    given: dict[str, object] = {
        "pages": PAGES,
        "block_tables": torch.zeros(1, 1, dtype=torch.int32),
        "cu_seqlens_k": running_sums([5]),
        "total_tokens": 5,
        "new_latents": ROWS,
        "cu_seqlens_q": SUMS,
    }
    with pytest.raises(KernelArgumentError, match=message):
        gather_latent(**(given | change))  # type: ignore[arg-type]
