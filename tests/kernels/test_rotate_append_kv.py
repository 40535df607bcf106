"""rotate_append_kv: what the separate ops give, in one launch: norm, rotation, slots, queries in both orders."""

from dataclasses import dataclass

import pytest
import torch
from torch.nn import functional

from kernels.append_kv import RotatedQueries, append_kv, rotate_append_kv
from kernels.backend import Backend
from kernels.errors import KernelArgumentError
from kernels.fp8 import E4M3
from kernels.layout import KvLayout, PageShape
from tests.kernels.compare import assert_same_bits
from tests.kernels.conftest import INTERPRETING
from tests.kernels.inputs import poisoned_pages
from tests.kernels.target import Target

EPS = 1e-6
NUM_POSITIONS = 50
NUM_PAGES, PAGE_TOKENS = 9, 16
# The interpreter runs a program for each token of eight heads or more; those that share one have a test of their own.
NUM_TOKENS = 7 if INTERPRETING else 19


@dataclass(frozen=True, slots=True)
class Heads:
    """A layer's shape; `rotary_dim` 0: all of a head turns."""

    q: int = 8
    kv: int = 2
    dim: int = 64
    rotary_dim: int = 0
    normed: bool = False
    dtype: torch.dtype = torch.bfloat16
    norm_dtype: torch.dtype | None = None  # None: dtype


@dataclass(frozen=True, slots=True)
class Inputs:
    heads: Heads
    qkv: torch.Tensor
    positions: torch.Tensor
    cos_sin: torch.Tensor
    slots: torch.Tensor
    norms: dict[str, torch.Tensor]


def make(heads: Heads, tokens: int = 19, device: str = "cpu", seed: int = 0) -> Inputs:
    """Random heads and angles; the fourth token is padding; the projection's rows are wider than its heads."""
    rng = torch.Generator().manual_seed(seed)
    wide = torch.randn(tokens, heads.q + 2 * heads.kv + 1, heads.dim, generator=rng).to(heads.dtype).to(device)
    angles = torch.rand(NUM_POSITIONS, (heads.rotary_dim or heads.dim) // 2, generator=rng) * 6.3
    slots = torch.randperm(NUM_PAGES * PAGE_TOKENS, generator=rng)[:tokens]
    slots[3:4] = -1
    drawn = {name: torch.randn(heads.dim, generator=rng) for name in ("q_norm", "k_norm")}
    norms = {name: weight.to(heads.norm_dtype or heads.dtype).to(device) for name, weight in drawn.items()}
    return Inputs(
        heads,
        wide[:, :-1],
        torch.randint(0, NUM_POSITIONS, (tokens,), generator=rng).to(device),
        torch.stack((angles.cos(), angles.sin()), dim=1).to(device),
        slots.to(device),
        norms if heads.normed else {},
    )


def normed(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    return x if weight is None else functional.rms_norm(x.to(weight.dtype), weight.shape, weight, EPS).to(x.dtype)


def turned(x: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """The model's rotation: halves in fp32, each product and sum rounded once, then to the dtype."""
    half = inputs.cos_sin.shape[2]
    cos, sin = (inputs.cos_sin[inputs.positions, i].unsqueeze(1) for i in (0, 1))
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    front = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    return torch.cat((front, x[..., 2 * half :]), dim=-1)


def separate(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values as the separate steps give them."""
    heads = inputs.heads
    q, k, v = inputs.qkv.tensor_split((heads.q, heads.q + heads.kv), dim=1)
    q, k = normed(q, inputs.norms.get("q_norm")), normed(k, inputs.norms.get("k_norm"))
    return turned(q, inputs), turned(k, inputs), v


def pages(heads: Heads, layout: KvLayout, target: Target, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    shape = PageShape(NUM_PAGES, PAGE_TOKENS, heads.kv, heads.dim)
    return [x.to(target.device) for x in poisoned_pages(shape, dtype or heads.dtype, layout)]


def run(inputs: Inputs, target: Target, own: list[torch.Tensor], **options: object) -> RotatedQueries:
    return rotate_append_kv(
        inputs.qkv,
        inputs.positions,
        inputs.cos_sin,
        own[0],
        own[1],
        inputs.slots,
        q_heads=inputs.heads.q,
        eps=EPS,
        backend=target.backend,
        **inputs.norms,
        **options,  # type: ignore[arg-type]
    )


def packed(q: torch.Tensor, heads: Heads) -> torch.Tensor:
    """[kv_heads, num_tokens, group, dim]."""
    return q.view(q.shape[0], heads.kv, heads.q // heads.kv, heads.dim).transpose(0, 1).contiguous()


def assert_norms(got: torch.Tensor, wanted: torch.Tensor, exact: bool) -> None:
    """To the bit but for a norm, whose sum may run in another order: then one rounding of the dtype, and rarely."""
    if exact:
        assert_same_bits(got, wanted)
        return
    same = got.isnan() & wanted.isnan() | got.eq(wanted)
    step = torch.finfo(got.dtype).eps
    difference = (got.double() - wanted.double()).abs()
    assert bool((same | (difference <= 4 * step * wanted.double().abs() + 4 * step)).all())
    assert got.dtype is torch.float32 or (~same).sum().item() <= 2 + got.numel() // 20


def check(
    heads: Heads,
    target: Target,
    layout: KvLayout = KvLayout.NHD,
    num_unpacked: int = 5,
    tokens: int = NUM_TOKENS,
) -> None:
    inputs = make(heads, tokens, target.device)
    q, k, v = separate(inputs)
    wanted, got = pages(heads, layout, target), pages(heads, layout, target)
    append_kv(k, v, *wanted, inputs.slots, layout=layout, backend=Backend.REFERENCE)
    out = torch.full_like(q, float("nan"))
    answer = run(inputs, target, got, layout=layout, num_unpacked=num_unpacked, out=out)
    assert answer.unpacked is out
    assert_norms(got[0], wanted[0], exact=not heads.normed)
    assert_same_bits(got[1], wanted[1])
    assert_norms(out[:num_unpacked], q[:num_unpacked], exact=not heads.normed)
    assert out[num_unpacked:].isnan().all()
    assert_norms(answer.packed, packed(q[num_unpacked:], heads), exact=not heads.normed)


@pytest.mark.parametrize("layout", list(KvLayout))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("is_normed", [False, True])
def test_layouts_and_dtypes(target: Target, is_normed: bool, dtype: torch.dtype, layout: KvLayout) -> None:
    check(Heads(normed=is_normed, dtype=dtype), target, layout)


def test_norms_with_fp32_weights(target: Target) -> None:
    """As of models whose weights are counted from one; values that bf16 does not have."""
    check(Heads(normed=True, norm_dtype=torch.float32), target)


@pytest.mark.parametrize("rotary_dim", [0, 32, 20])
@pytest.mark.parametrize("dim", [80, 96, 112, 128, 192, 256])
def test_dims_and_partial_rotation(target: Target, dim: int, rotary_dim: int) -> None:
    check(Heads(dim=dim, rotary_dim=rotary_dim, normed=rotary_dim == 20), target)


@pytest.mark.parametrize(("q", "kv"), [(1, 1), (28, 4), (16, 1), (12, 12), (3, 3)])
def test_numbers_of_heads(target: Target, q: int, kv: int) -> None:
    check(Heads(q=q, kv=kv), target, tokens=NUM_TOKENS if q >= 12 else 19)


@pytest.mark.parametrize("num_unpacked", [0, NUM_TOKENS])
def test_all_or_none_packed(target: Target, num_unpacked: int) -> None:
    check(Heads(), target, num_unpacked=num_unpacked)


def test_positions_may_be_32_bit_and_outputs_given(target: Target) -> None:
    inputs = make(Heads(), device=target.device)
    q, _, _ = separate(inputs)
    packed_out = torch.empty(2, 19, 4, 64, dtype=q.dtype, device=target.device)
    own = pages(inputs.heads, KvLayout.NHD, target)
    short = Inputs(inputs.heads, inputs.qkv, inputs.positions.int(), inputs.cos_sin, inputs.slots, {})
    assert run(short, target, own, packed_out=packed_out).packed is packed_out
    assert_same_bits(packed_out, packed(q, inputs.heads))


def test_a_padding_token_has_its_query_but_no_slot(target: Target) -> None:
    inputs = make(Heads(), tokens=4, device=target.device)
    inputs.slots.fill_(-1)
    own = pages(inputs.heads, KvLayout.NHD, target)
    answer = run(inputs, target, own, num_unpacked=4)
    assert own[0].isnan().all() and own[1].isnan().all()
    assert_same_bits(answer.unpacked, separate(inputs)[0])


def test_no_tokens(target: Target) -> None:
    inputs = make(Heads(), tokens=0, device=target.device)
    answer = run(inputs, target, pages(inputs.heads, KvLayout.NHD, target))
    assert answer.unpacked.shape == (0, 8, 64) and answer.packed.shape == (2, 0, 4, 64)


@pytest.mark.parametrize("layout", list(KvLayout))
@pytest.mark.parametrize("rotary_dim", [0, 48])
@pytest.mark.parametrize("per_token", [False, True])
def test_codes(target: Target, per_token: bool, rotary_dim: int, layout: KvLayout) -> None:
    """The codes and scales that append_kv makes of the rotated, rounded keys."""
    heads = Heads(dim=80, rotary_dim=rotary_dim)
    inputs = make(heads, NUM_TOKENS, target.device)
    _, k, v = separate(inputs)
    results = []
    for fused in (False, True):
        own = pages(heads, layout, target, E4M3)
        size = (NUM_PAGES, heads.kv, PAGE_TOKENS) if per_token else (1,)
        scales = [torch.full(size, fill, device=target.device) for fill in (0.0625, 0.03)]
        options = {"k_scales": scales[0], "v_scales": scales[1], "layout": layout}
        if fused:
            run(inputs, target, own, **options)
        else:
            append_kv(k, v, *own, inputs.slots, **options, backend=Backend.REFERENCE)
        results.append((*own, *scales))
    for wanted, got in zip(*results, strict=True):
        assert_same_bits(got, wanted)


def test_a_token_does_not_see_the_others(target: Target) -> None:
    """One token alone has the bits that it has among nineteen, norm included."""
    inputs = make(Heads(normed=True), device=target.device)
    both = [pages(inputs.heads, KvLayout.NHD, target) for _ in range(2)]
    q = run(inputs, target, both[0], num_unpacked=19).unpacked
    alone = Inputs(
        inputs.heads, inputs.qkv[7:8], inputs.positions[7:8], inputs.cos_sin, inputs.slots[7:8], inputs.norms
    )
    assert_same_bits(run(alone, target, both[1], num_unpacked=1).unpacked, q[7:8])
    page, slot = divmod(int(inputs.slots[7]), PAGE_TOKENS)
    assert_same_bits(both[1][0][page, slot], both[0][0][page, slot])


def test_a_pool_beyond_two_billion_elements(target: Target) -> None:
    """Pages lie 2^30 elements apart in memory that is never touched, so that page 2 needs a 64-bit address."""
    stride, heads = 2**30, Heads(q=1, kv=1, dtype=torch.float16)
    pool = torch.empty(2 * stride + 16 * 64, dtype=torch.float16, device=target.device)
    own = [pool.as_strided((3, 16, 1, 64), (stride, 64, 64, 1)), torch.zeros(3, 16, 1, 64).half().to(target.device)]
    inputs = make(heads, tokens=1, device=target.device)
    inputs.slots.fill_(2 * 16 + 15)
    run(inputs, target, own)
    assert_same_bits(pool[2 * stride + 15 * 64 :], separate(inputs)[1][0, 0])


GIVEN = make(Heads())
Q_NORM = torch.ones(64, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qkv": GIVEN.qkv[:, :11]}, r"qkv: shape must be \[any, 12, 64\], got \[19, 11, 64\]"),
        ({"qkv": GIVEN.qkv.half()}, r"k_scales: torch.float16 and torch.bfloat16 pages need scales, got None"),
        ({"q_heads": 7}, "q_heads: must be a multiple of the pages' 2 heads, got 7"),
        ({"positions": GIVEN.positions[:5]}, r"positions: shape must be \[19\], got \[5\]"),
        ({"positions": GIVEN.positions.float()}, "positions: dtype must be one of"),
        ({"slot_mapping": GIVEN.slots.int()}, "slot_mapping: dtype must be one of"),
        ({"cos_sin": GIVEN.cos_sin.half()}, "cos_sin: dtype must be one of"),
        ({"cos_sin": torch.zeros(50, 2, 33)}, "cos_sin: turns 66 elements of heads that have 64"),
        ({"q_norm": Q_NORM}, "k_norm: the other norm needs it, got None"),
        ({"q_norm": Q_NORM, "k_norm": Q_NORM.float()}, "k_norm: dtype must be one of"),
        ({"q_norm": Q_NORM.double(), "k_norm": Q_NORM}, "q_norm: dtype must be one of"),
        ({"num_unpacked": 20}, r"num_unpacked: must be within 0\.\.19, got 20"),
        ({"out": torch.zeros(19, 8, 64)}, "out: dtype must be one of"),
        ({"out": GIVEN.qkv[:, :8]}, "out: must be contiguous"),
        ({"packed_out": Q_NORM}, r"packed_out: shape must be \[2, 19, 4, 64\]"),
        ({"k_scales": torch.ones(1)}, "k_scales: nothing to scale"),
    ],
)
def test_what_is_refused(change: dict[str, object], message: str) -> None:
    k_pages, v_pages = poisoned_pages(PageShape(9, 16, 2, 64), torch.bfloat16, KvLayout.NHD)
    given: dict[str, object] = {
        "qkv": GIVEN.qkv,
        "positions": GIVEN.positions,
        "cos_sin": GIVEN.cos_sin,
        "k_pages": k_pages,
        "v_pages": v_pages,
        "slot_mapping": GIVEN.slots,
        "q_heads": 8,
    }
    with pytest.raises(KernelArgumentError, match=message):
        rotate_append_kv(**(given | change))  # type: ignore[arg-type]


def test_outputs_that_are_read() -> None:
    k_pages, v_pages = poisoned_pages(PageShape(9, 16, 2, 64), torch.bfloat16, KvLayout.NHD)
    whole = torch.zeros(19, 12, 64, dtype=torch.bfloat16)
    args = (GIVEN.positions, GIVEN.cos_sin, k_pages, v_pages, GIVEN.slots)
    with pytest.raises(KernelArgumentError, match="out: shares memory with qkv"):
        rotate_append_kv(whole, *args, q_heads=8, out=whole.view(-1, 64)[: 19 * 8].view(19, 8, 64))
    with pytest.raises(KernelArgumentError, match="packed_out: shares memory with k_pages"):
        rotate_append_kv(whole, *args, q_heads=8, packed_out=k_pages.view(-1)[: 19 * 512].view(2, 19, 4, 64))
