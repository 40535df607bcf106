"""fp8 e4m3 pages: codes of append and scatter, numbers of gather, exactly as the definitions give them."""

import pytest
import torch

from kernels.append_kv import append_kv
from kernels.errors import KernelArgumentError
from kernels.fp8 import E4M3, dequantise, dequantised_by_table, quantise
from kernels.gather_pages import gather_pages, scatter_pages
from kernels.layout import KvLayout, PageShape
from kernels.prefill_attention import prefill_attention
from tests.kernels.compare import assert_same_bits
from tests.kernels.inputs import CaseShape, PagedCase, make_case, poisoned_pages, running_sums, write_tokens
from tests.kernels.target import Target

NUMBERS = torch.arange(127, dtype=torch.uint8).view(E4M3).double()
RAGGED = [(0, 0), (16, 1), (0, 7), (0, 0), (30, 19), (64, 0)]
WIDE = [torch.bfloat16, torch.float16, torch.float32]


def nearest_code(x: float) -> int:
    """By search over all codes: the nearest one, of two the even one, of too large ones the last one."""
    distance = (NUMBERS - abs(x)).abs()
    nearest = (distance == distance.min()).nonzero().flatten().tolist()
    return next(code for code in nearest if len(nearest) == 1 or code % 2 == 0) + 128 * (x < 0)


def codes(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Codes of rows by search; scales broadcast."""
    quotients = (rows.float() / scales).flatten().tolist()
    raw = torch.tensor([nearest_code(x) for x in quotients], dtype=torch.uint8)
    return raw.view(E4M3).view(rows.shape)


def rows_of(tokens: int, heads: int, dim: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Rows of very different sizes, a row of zeros among them."""
    rng = torch.Generator().manual_seed(seed)
    size = torch.logspace(-3, 3, tokens * heads).view(tokens, heads, 1)
    rows = torch.randn(tokens, heads, dim, generator=rng) * size
    rows[tokens // 2] = 0.0
    return rows.to(dtype)


def test_the_search_agrees_with_the_conversion() -> None:
    """Every code, every midpoint, a hair beside each, and what lies beyond the last code."""
    middle = (NUMBERS[:-1] + NUMBERS[1:]) / 2
    x = torch.cat([NUMBERS, middle, middle * (1 + 1e-6), middle * (1 - 1e-6), torch.tensor([463.0, 464.0, 465.0, 1e4])])
    x = torch.cat([x, -x[x > 0]]).float()
    one = torch.ones(1)
    assert_same_bits(quantise(x, one), codes(x, one))
    assert quantise(torch.tensor([float("inf"), float("-inf")]), one).float().tolist() == [448.0, -448.0]
    assert quantise(torch.tensor([float("nan")]), one).isnan().all()


def test_the_table_has_the_products_of_all_codes() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(E4M3).view(2, 64, 2).transpose(0, 2)
    for scale in (torch.tensor([0.03]), torch.tensor([2.0**-20])):
        numbers, wanted = dequantised_by_table(every, scale), dequantise(every, scale, torch.float32)
        assert_same_bits(numbers.nan_to_num(), wanted.nan_to_num())
        assert torch.equal(numbers.isnan(), wanted.isnan())


def empty_pages(shape: PageShape, layout: KvLayout, target: Target) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = poisoned_pages(shape, E4M3, layout)
    return k.to(target.device), v.to(target.device)


def empty_scales(shape: PageShape, target: Target) -> tuple[torch.Tensor, torch.Tensor]:
    size = (shape.num_pages, shape.heads, shape.page_tokens)
    return torch.full(size, 7.5, device=target.device), torch.full(size, 7.5, device=target.device)


@pytest.mark.parametrize("layout", list(KvLayout))
@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize("per_token", [False, True])
def test_append(target: Target, per_token: bool, dtype: torch.dtype, layout: KvLayout) -> None:
    """dim 80 has no tile of its own; padding tokens and all other slots and scales stay as they were."""
    shape = PageShape(5, 16, 2, 80)
    slots = torch.tensor([17, 3, -1, 64, 79, 33])
    k, v = (rows_of(6, 2, 80, dtype, seed) for seed in (0, 1))
    k[2] = v[2] = float("nan")
    kept, wanted = slots >= 0, poisoned_pages(shape, E4M3, layout)
    page, slot = slots[kept] // 16, slots[kept] % 16
    if per_token:
        scales, wanted_scales = empty_scales(shape, target), empty_scales(shape, Target("cpu", target.backend))
        used = [(x[kept].float().abs().amax(dim=-1) / 448.0).clamp_min(2.0**-126) for x in (k, v)]
        for all_scales, own in zip(wanted_scales, used, strict=True):
            all_scales[page, :, slot] = own
    else:
        wanted_scales = (torch.tensor([0.37]), torch.tensor([1.0]))
        scales = tuple(scale.to(target.device) for scale in wanted_scales)
        used = [scale.view(1, 1) for scale in wanted_scales]
    new = [codes(x[kept], own.unsqueeze(-1)) for x, own in zip((k, v), used, strict=True)]
    write_tokens(*wanted, page, slot, *new, layout)
    got = empty_pages(shape, layout, target)
    append_kv(
        k.to(target.device),
        v.to(target.device),
        *got,
        slots.to(target.device),
        k_scales=scales[0],
        v_scales=scales[1],
        layout=layout,
        backend=target.backend,
    )
    for one, other in zip((*got, *scales), (*wanted, *wanted_scales), strict=True):
        assert_same_bits(one.cpu(), other)


def scales_of(case: PagedCase, per_token: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales of key and value pages."""
    device = case.k_pages.device
    if not per_token:
        return torch.tensor([0.3], device=device), torch.tensor([1.7], device=device)
    pages, tokens = case.k_pages.shape[0], case.page_tokens
    rng = torch.Generator().manual_seed(5)
    size = (pages, case.keys[0].shape[1], tokens)
    return tuple((torch.rand(size, generator=rng) + 0.1).to(device) for _ in range(2))


def dense_scales(case: PagedCase, scales: torch.Tensor) -> torch.Tensor:
    """[total_tokens, heads, 1], token by token."""
    if scales.dim() == 1:
        return scales
    found = [
        scales[case.block_tables[seq, i // case.page_tokens].long(), :, i % case.page_tokens]
        for seq, total in enumerate(case.seqlens_k.tolist())
        for i in range(total)
    ]
    return torch.stack(found).unsqueeze(-1)


def check_gather(case: PagedCase, target: Target, per_token: bool, dtype: torch.dtype) -> None:
    scales = scales_of(case, per_token)
    got = gather_pages(
        case.k_pages,
        case.v_pages,
        case.block_tables,
        case.cu_seqlens_k,
        case.total_tokens,
        out_dtype=dtype,
        k_scales=scales[0],
        v_scales=scales[1],
        layout=case.layout,
        backend=target.backend,
    )
    for out, dense, scale in zip(got, (case.keys, case.values), scales, strict=True):
        assert out.dtype is dtype
        wanted = torch.cat([rows.float() for rows in dense]) * dense_scales(case, scale)
        assert_same_bits(out, wanted.to(dtype))


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("layout", list(KvLayout))
def test_gather_of_a_ragged_batch(target: Target, layout: KvLayout, per_token: bool) -> None:
    shape = CaseShape(dtype=E4M3, layout=layout, dim=80, shared_pages=1, device=target.device)
    check_gather(make_case(RAGGED, shape), target, per_token, torch.bfloat16)


def test_gather_to_every_dtype(target: Target) -> None:
    case = make_case([(3, 2), (0, 20)], CaseShape(dtype=E4M3, kv_heads=1, device=target.device))
    for dtype in WIDE:
        check_gather(case, target, per_token=True, dtype=dtype)


@pytest.mark.parametrize("dim", [64, 128, 192, 512])
@pytest.mark.parametrize("page_tokens", [1, 16, 64, 256])
def test_gather_of_page_sizes_and_dims(target: Target, page_tokens: int, dim: int) -> None:
    shape = CaseShape(page_tokens=page_tokens, dim=dim, kv_heads=1, dtype=E4M3, device=target.device)
    case = make_case([(page_tokens, 1), (0, 3)], shape)
    check_gather(case, target, per_token=True, dtype=torch.bfloat16)
    if dim == 192:
        check_gather(case, target, per_token=False, dtype=torch.bfloat16)


@pytest.mark.parametrize("layout", list(KvLayout))
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("dim", [64, 192])
def test_scatter(target: Target, dim: int, per_token: bool, layout: KvLayout) -> None:
    """Scattered tokens give the codes, scales and untouched slots that appending them one by one gives."""
    shape = PageShape(9, 16, 2, dim)
    lengths, tables = [17, 0, 5], torch.tensor([[4, 2], [0, 0], [7, 0]], dtype=torch.int32)
    slots = torch.tensor([4 * 16 + i for i in range(16)] + [2 * 16] + [7 * 16 + i for i in range(5)])
    k, v = (rows_of(22, 2, dim, torch.bfloat16, seed) for seed in (0, 1))
    results = []
    for scatter in (True, False):
        pages = empty_pages(shape, layout, target)
        scales = empty_scales(shape, target)
        if not per_token:
            scales = (torch.tensor([0.37], device=target.device), torch.tensor([2.0], device=target.device))
        rows = (k.to(target.device), v.to(target.device), *pages)
        options = {"k_scales": scales[0], "v_scales": scales[1], "layout": layout, "backend": target.backend}
        if scatter:
            scatter_pages(*rows, tables.to(target.device), running_sums(lengths, target.device), **options)
        else:
            append_kv(*rows, slots.to(target.device), **options)
        results.append((*pages, *scales))
    for got, wanted in zip(*results, strict=True):
        assert_same_bits(got, wanted)


@pytest.mark.parametrize("layout", list(KvLayout))
def test_codes_move_as_they_are_without_scales(target: Target, layout: KvLayout) -> None:
    case = make_case([(16, 1), (0, 0), (0, 7)], CaseShape(dtype=E4M3, layout=layout, dim=192, device=target.device))
    where = (case.block_tables, case.cu_seqlens_k)
    options = {"layout": layout, "backend": target.backend}
    k, v = gather_pages(case.k_pages, case.v_pages, *where, case.total_tokens, **options)
    assert_same_bits(k, torch.cat([rows.view(torch.uint8) for rows in case.keys]).view(E4M3))
    assert_same_bits(v, torch.cat([rows.view(torch.uint8) for rows in case.values]).view(E4M3))
    fresh = torch.full_like(case.k_pages, float("nan")), torch.full_like(case.v_pages, float("nan"))
    scatter_pages(k, v, *fresh, *where, **options)
    assert_same_bits(fresh[0], case.k_pages)
    assert_same_bits(fresh[1], case.v_pages)


def test_what_saturates_and_what_stays_nan(target: Target) -> None:
    """Per tensor, so that the scale does not follow: 500 is 448, infinity too, and NaN is NaN."""
    k = torch.zeros(1, 1, 16, dtype=torch.bfloat16, device=target.device)
    k[0, 0, :5] = torch.tensor([500.0, -1e30, float("inf"), float("nan"), 17.0], device=target.device)
    pages = empty_pages(PageShape(1, 1, 1, 16), KvLayout.NHD, target)
    one = torch.ones(1, device=target.device)
    slot = torch.zeros(1, dtype=torch.int64, device=target.device)
    append_kv(k, k, *pages, slot, k_scales=one, v_scales=one, backend=target.backend)
    got = pages[0].float().flatten().tolist()
    assert got[:3] == [448.0, -448.0, 448.0] and got[3] != got[3] and got[4] == 16.0


PAGES = torch.zeros(4, 2, 16, 2, 64, dtype=E4M3)
ROWS = torch.zeros(3, 2, 64, dtype=torch.bfloat16)
SLOTS = torch.tensor([0, 1, 2])
ONE = torch.ones(1)
PER_TOKEN = torch.zeros(4, 2, 2, 16)


@pytest.mark.parametrize(
    ("k_scales", "v_scales", "message"),
    [
        (None, ONE, "k_scales: torch.bfloat16 and torch.float8_e4m3fn pages need scales, got None"),
        (ONE, None, "v_scales: torch.bfloat16 and torch.float8_e4m3fn pages need scales, got None"),
        (torch.ones(2), torch.ones(2), r"k_scales: shape must be \[1\], got \[2\]"),
        (PER_TOKEN[:3, 0], PER_TOKEN[:3, 1], r"k_scales: shape must be \[4, 2, 16\], got \[3, 2, 16\]"),
        (PER_TOKEN[:, 0], ONE, r"v_scales: shape must be \[4, 2, 16\], got \[1\]"),
        (ONE.double(), ONE, "k_scales: dtype must be one of"),
        (PER_TOKEN[:, 0], PER_TOKEN[:, 0], "k_scales: shares memory with v_scales"),
        (torch.zeros(1, 2, 16).expand(4, 2, 16), PER_TOKEN[:, 1], "k_scales: pages overlap"),
        (torch.zeros(4, 16, 2).transpose(1, 2), PER_TOKEN[:, 1], "k_scales: a page must be dense"),
    ],
)
def test_scales_that_do_not_fit(k_scales: torch.Tensor | None, v_scales: torch.Tensor | None, message: str) -> None:
    with pytest.raises(KernelArgumentError, match=message):
        append_kv(ROWS, ROWS, PAGES[:, 0], PAGES[:, 1], SLOTS, k_scales=k_scales, v_scales=v_scales)


def test_what_fp8_cannot_do() -> None:
    pages = (PAGES[:, 0], PAGES[:, 1])
    with pytest.raises(KernelArgumentError, match=r"v: dtype must be k's torch.bfloat16, got torch.float16"):
        append_kv(ROWS, ROWS.half(), *pages, SLOTS, k_scales=ONE, v_scales=ONE)
    with pytest.raises(KernelArgumentError, match="k_scales: nothing to scale between"):
        append_kv(ROWS.to(E4M3), ROWS.to(E4M3), *pages, SLOTS, k_scales=ONE, v_scales=ONE)
    tables, sums = torch.zeros(1, 1, dtype=torch.int32), running_sums([3])
    with pytest.raises(KernelArgumentError, match=r"out_dtype: torch\.float8_e4m3fn pages do not give torch.int8"):
        gather_pages(*pages, tables, sums, 3, out_dtype=torch.int8)
    case = make_case([(0, 3)], CaseShape())
    with pytest.raises(KernelArgumentError, match=r"out_dtype: torch\.bfloat16 pages do not give torch.float16"):
        gather_pages(case.k_pages, case.v_pages, tables, sums, 3, out_dtype=torch.float16)
    with pytest.raises(KernelArgumentError, match=r"k_scales: .* pages need scales, got None"):
        prefill_attention(ROWS, *pages, tables, sums, sums, 3)
