"""decode_attention over fp8 pages on Hopper: codes become fp16 numbers in registers, in orders of their own.

On any other GPU these tests skip. All memory that no sequence holds is NaN (tests/kernels/inputs.py).
"""

from dataclasses import replace

import pytest
import torch

from kernels.backend import Backend
from kernels.decode_attention import decode_attention
from kernels.fp8 import E4M3
from kernels.layout import KvLayout
from tests.kernels.compare import assert_lse, assert_output, assert_same_bits
from tests.kernels.dense import dense_attention
from tests.kernels.inputs import PagedCase
from tests.kernels.test_decode_on_device import LENGTHS, alone, decoding, run
from tests.kernels.test_decode_tokens import widened

pytestmark = pytest.mark.gpu

SCALES = (0.4, 1.3)


@pytest.fixture(autouse=True)
def hopper() -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")


def coded(lengths: list[int], *, size: float = 1.0, dtype: torch.dtype = torch.bfloat16, **shape: object) -> PagedCase:
    """Pages of codes, and queries of about `size`."""
    case = decoding(lengths, dtype=E4M3, **shape)
    q = size * torch.randn(case.q.shape, generator=torch.Generator().manual_seed(1))
    return replace(case, q=q.to(dtype).cuda())


def scales() -> dict[str, torch.Tensor]:
    return {f"{name}_scales": torch.tensor([scale], device="cuda") for name, scale in zip("kv", SCALES, strict=True)}


def check(case: PagedCase, **options: object) -> None:
    given = scales()
    out, lse = run(case, **options, **given)
    wanted, wanted_lse = dense_attention(widened(case, *given.values()), **options)  # type: ignore[arg-type]
    assert_output(out, wanted)
    assert_lse(lse, wanted_lse)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("layout", [KvLayout.NHD, KvLayout.HND])
@pytest.mark.parametrize("window", [0, 300])
def test_ragged_batch(dim: int, layout: KvLayout, window: int) -> None:
    check(coded(LENGTHS, dim=dim, layout=layout, window=window))


@pytest.mark.parametrize("page_tokens", [16, 64, 256])
@pytest.mark.parametrize("group", [1, 7, 16])
def test_pages_and_groups(page_tokens: int, group: int) -> None:
    check(coded([3, page_tokens, 3000], page_tokens=page_tokens, q_heads=2 * group))


def test_options_together() -> None:
    sinks = torch.linspace(-3.0, 6.0, 8, device="cuda")
    check(coded(LENGTHS, window=700), sinks=sinks, softcap=15.0, scale=0.2)


@pytest.mark.parametrize("size", [1e-20, 1e-6, 3e5, 1e20])
@pytest.mark.parametrize("dim", [128, 256])
def test_queries_that_fp16_does_not_reach(size: float, dim: int) -> None:
    check(coded([70, 600], size=size, dim=dim), scale=0.1 / size)


def test_fp16_queries_and_queries_of_zeros() -> None:
    check(coded([70, 600], dtype=torch.float16))
    check(coded([70, 600], size=0.0))


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_other_requests_change_no_bit(dim: int) -> None:
    case = coded(LENGTHS, dim=dim)
    together, lse = run(case, **scales())
    for seq, (_, new) in enumerate(case.lengths):
        row = slice(int(case.cu_seqlens_q[seq]), int(case.cu_seqlens_q[seq]) + new)
        out, own_lse = run(alone(case, seq), **scales())
        assert_same_bits(out, together[row])
        assert_same_bits(own_lse, lse[:, row])


@pytest.mark.parametrize("dim", [128, 256])
def test_tokens_together_have_the_bits_of_tokens_alone(dim: int) -> None:
    """Eight tokens of four heads fill more columns than registers hold values for at once."""
    case = coded([3000], dim=dim, q_heads=8)
    q = torch.randn(8, 8, dim, device="cuda").to(torch.bfloat16)
    pages = (case.k_pages, case.v_pages, case.block_tables)

    def attend(first: int, count: int) -> torch.Tensor:
        end = 3000 - 8 + first + count
        lengths = torch.tensor([end], dtype=torch.int32, device="cuda")
        starts = torch.tensor([0, count], dtype=torch.int32, device="cuda")
        options = {"cu_seqlens_q": starts, "max_q_tokens": count, "backend": Backend.GLUON, **scales()}
        return decode_attention(q[first : first + count], *pages, lengths, **options)  # type: ignore[call-overload, no-any-return]

    together = attend(0, 8)
    for token in range(8):
        assert_same_bits(attend(token, 1), together[token : token + 1])


def test_many_launches_have_the_bits_of_the_first() -> None:
    """A tile's slot is given back only when its codes have been read: else the next tile's would be among them."""
    case = coded([4000] * 40, q_heads=8)
    first = run(case, **scales())[0]
    for _ in range(50):
        assert_same_bits(run(case, **scales())[0], first)
