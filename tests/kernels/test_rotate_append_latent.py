"""rotate_append_latent: what the separate ops give, in one launch: norm, rotation, slots, queries turned in place."""

from dataclasses import dataclass, replace

import pytest
import torch

from kernels.backend import Backend
from kernels.errors import KernelArgumentError
from kernels.rms_norm import rms_norm
from kernels.rotate_append_latent import rotate_append_latent
from tests.kernels.compare import assert_same_bits
from tests.kernels.conftest import INTERPRETING
from tests.kernels.inputs import POISON
from tests.kernels.target import Target

EPS = 1e-6
NUM_POSITIONS = 50
NUM_PAGES, PAGE_TOKENS = 9, 16
PADDING = 3  # the token without a slot
NUM_TOKENS = 7 if INTERPRETING else 19


@dataclass(frozen=True, slots=True)
class Dims:
    """A layer's shape; norm_dtype None: dtype."""

    heads: int = 4
    latent: int = 512
    rope: int = 64
    nope: int = 128
    dtype: torch.dtype = torch.bfloat16
    norm_dtype: torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class Inputs:
    dims: Dims
    q: torch.Tensor
    kv: torch.Tensor
    positions: torch.Tensor
    cos_sin: torch.Tensor | None
    slots: torch.Tensor
    norm: torch.Tensor

    def pages(self) -> torch.Tensor:
        size = (NUM_PAGES, PAGE_TOKENS, self.dims.latent + self.dims.rope)
        return torch.full(size, POISON, dtype=self.dims.dtype, device=self.q.device)

    def tokens(self, rows: slice) -> "Inputs":
        """Some of the tokens, with memory of their own."""
        parts = (self.q, self.kv, self.positions, self.slots)
        q, kv, positions, slots = (part[rows].clone() for part in parts)
        return replace(self, q=q, kv=kv, positions=positions, slots=slots)


def make(dims: Dims = Dims(), tokens: int = NUM_TOKENS, device: str = "cpu") -> Inputs:
    """Queries and latents are slices of one product's rows; one token is padding."""
    rng = torch.Generator().manual_seed(0)
    q_width, kv_width = dims.heads * (dims.nope + dims.rope), dims.latent + dims.rope
    rows = torch.randn(tokens, q_width + kv_width + 8, generator=rng).to(dims.dtype).to(device)
    angles = torch.rand(NUM_POSITIONS, dims.rope // 2, generator=rng) * 6.3
    slots = torch.randperm(NUM_PAGES * PAGE_TOKENS, generator=rng)[:tokens]
    slots[PADDING : PADDING + 1] = -1
    return Inputs(
        dims,
        rows[:, :q_width].view(tokens, dims.heads, dims.nope + dims.rope),
        rows[:, q_width : q_width + kv_width],
        torch.randint(0, NUM_POSITIONS, (tokens,), generator=rng).to(device),
        torch.stack((angles.cos(), angles.sin()), dim=1).to(device),
        slots.to(device),
        torch.randn(dims.latent, generator=rng).to(dims.norm_dtype or dims.dtype).to(device),
    )


def turned(x: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """x [num_tokens, heads, rope]: halves in fp32, each product and sum rounded once, then to the dtype."""
    assert inputs.cos_sin is not None
    cos, sin = inputs.cos_sin[inputs.positions].unsqueeze(2).unbind(1)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def separate(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and pages as the separate steps give them."""
    q, pages, latent = inputs.q.clone(), inputs.pages(), inputs.dims.latent
    q[..., inputs.dims.nope :] = turned(q[..., inputs.dims.nope :], inputs)
    latents = rms_norm(inputs.kv[:, :latent], inputs.norm, EPS, backend=Backend.REFERENCE)
    rope_keys = turned(inputs.kv[:, None, latent:], inputs)[:, 0]
    kept = inputs.slots >= 0
    flat = pages.view(-1, pages.shape[-1])
    flat[inputs.slots[kept]] = torch.cat((latents, rope_keys), dim=-1)[kept]
    return q, pages


def run(inputs: Inputs, target: Target, pages: torch.Tensor) -> None:
    rotate_append_latent(
        inputs.q,
        inputs.kv,
        inputs.positions,
        inputs.cos_sin,
        pages,
        inputs.slots,
        norm=inputs.norm,
        eps=EPS,
        backend=target.backend,
    )


def assert_latents(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """To one rounding, and rarely that: the norm's sum may run in another order."""
    assert_same_bits(got.isnan(), wanted.isnan())
    difference = (got.double() - wanted.double()).abs().nan_to_num()
    step = torch.finfo(got.dtype).eps
    assert bool((difference <= 4 * step * (wanted.double().abs().nan_to_num() + 1)).all())
    assert got.dtype is torch.float32 or int(difference.count_nonzero()) <= 2 + got.numel() // 20


def check(inputs: Inputs, target: Target) -> None:
    q, wanted = separate(inputs)
    kv, got, latent = inputs.kv.clone(), inputs.pages(), inputs.dims.latent
    run(inputs, target, got)
    assert_same_bits(inputs.q, q)
    assert_same_bits(inputs.kv, kv)
    assert_latents(got[..., :latent], wanted[..., :latent])
    assert_same_bits(got[..., latent:], wanted[..., latent:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "dims", [Dims(), Dims(nope=192, heads=20), Dims(3, 32, 8, 16), Dims(1, 48, 20, 0), Dims(16, 512, 64, 64)], ids=str
)
def test_dims_and_dtypes(target: Target, dims: Dims, dtype: torch.dtype) -> None:
    """Of DeepSeek-V3, GLM-4.7-Flash, tiny models, sizes that are no powers of two, and heads that fill a program."""
    check(make(replace(dims, dtype=dtype), device=target.device), target)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dims", [Dims(), Dims(3, 48, 20, 0)], ids=str)
def test_nothing_turns_without_a_table(target: Target, dims: Dims, dtype: torch.dtype) -> None:
    """Of Kimi Linear: what a table of no angles would give."""
    inputs = make(replace(dims, dtype=dtype), device=target.device)
    still = torch.tensor([[1.0], [0.0]], device=target.device).repeat(NUM_POSITIONS, 1, dims.rope // 2)
    q, wanted = separate(replace(inputs, cos_sin=still))
    got, latent = inputs.pages(), dims.latent
    run(replace(inputs, cos_sin=None), target, got)
    assert_same_bits(inputs.q, q)
    assert_latents(got[..., :latent], wanted[..., :latent])
    assert_same_bits(got[..., latent:], wanted[..., latent:])


def test_a_norm_with_fp32_weights(target: Target) -> None:
    check(make(Dims(norm_dtype=torch.float32), device=target.device), target)


def test_positions_may_be_32_bit(target: Target) -> None:
    inputs = make(device=target.device)
    check(replace(inputs, positions=inputs.positions.int()), target)


def test_a_padding_token_has_its_query_but_no_slot(target: Target) -> None:
    inputs = make(tokens=4, device=target.device)
    inputs.slots.fill_(-1)
    wanted, pages = separate(inputs)[0], inputs.pages()
    run(inputs, target, pages)
    assert pages.isnan().all()
    assert_same_bits(inputs.q, wanted)


def test_pages_of_many_layers_lie_apart(target: Target) -> None:
    inputs = make(device=target.device)
    size = (NUM_PAGES, 2, PAGE_TOKENS, inputs.dims.latent + inputs.dims.rope)
    pool = torch.full(size, POISON, dtype=inputs.dims.dtype, device=target.device)
    wanted = inputs.pages()
    run(replace(inputs, q=inputs.q.clone()), target, wanted)
    run(inputs, target, pool[:, 1])
    assert pool[:, 0].isnan().all()
    assert_same_bits(pool[:, 1].contiguous(), wanted)


def test_a_token_does_not_see_the_others(target: Target) -> None:
    """One token alone has the bits that it has among all, norm included."""
    inputs, alone = (make(device=target.device) for _ in range(2))
    one, both = alone.tokens(slice(5, 6)), [inputs.pages(), inputs.pages()]
    run(inputs, target, both[0])
    run(one, target, both[1])
    assert_same_bits(one.q, inputs.q[5:6])
    page, slot = divmod(int(inputs.slots[5]), PAGE_TOKENS)
    assert_same_bits(both[1][page, slot], both[0][page, slot])


def test_a_pool_beyond_two_billion_elements(target: Target) -> None:
    """Pages lie 2^30 elements apart in memory that is never touched, so that page 2 needs a 64-bit address."""
    stride, inputs = 2**30, make(Dims(dtype=torch.float16), tokens=1, device=target.device)
    pool = torch.empty(2 * stride + 16 * 576, dtype=torch.float16, device=target.device)
    inputs.slots.fill_(2 * 16 + 15)
    wanted = inputs.pages()
    run(replace(inputs, q=inputs.q.clone()), target, wanted)
    run(inputs, target, pool.as_strided((3, 16, 576), (stride, 576, 1)))
    assert_same_bits(pool[2 * stride + 15 * 576 :], wanted[2, 15])


def test_no_tokens(target: Target) -> None:
    inputs = make(tokens=0, device=target.device)
    pages = inputs.pages()
    run(inputs, target, pages)
    assert pages.isnan().all()


GIVEN = make(tokens=19)
assert GIVEN.cos_sin is not None
WHOLE = GIVEN.kv.new_zeros(19, 4 * 192 + 576)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pages": GIVEN.pages()[0]}, r"pages: shape must be \[any, any, any\]"),
        ({"pages": GIVEN.pages()[..., ::2]}, "pages: a page must be dense"),
        ({"kv": GIVEN.kv[:, :575]}, r"kv: shape must be \[any, 576\], got \[19, 575\]"),
        ({"kv": GIVEN.kv.half()}, "kv: dtype must be one of"),
        ({"kv": WHOLE[:, ::2][:, :576]}, "kv: the last axis must have stride 1"),
        ({"norm": GIVEN.norm[:500]}, r"kv: rows of 576 are not a latent of 500 \(norm\) and 64 that turn"),
        ({"norm": GIVEN.norm.half()}, "norm: dtype must be one of"),
        ({"cos_sin": GIVEN.cos_sin.half()}, "cos_sin: dtype must be one of"),
        ({"cos_sin": torch.zeros(50, 2, 33)}, "kv: rows of 576 are not a latent of 512"),
        ({"cos_sin": None, "norm": GIVEN.norm[:511]}, "kv: the 65 elements behind the latent must be an even number"),
        ({"q": GIVEN.q[:5]}, r"q: shape must be \[19, any, any\], got \[5, 4, 192\]"),
        ({"q": GIVEN.q[..., :63]}, r"q: needs heads of at least the 64 that turn, got \[19, 4, 63\]"),
        ({"q": GIVEN.q[..., :128]}, "q: a token's heads must be contiguous"),
        ({"q": GIVEN.q.half()}, "q: dtype must be one of"),
        ({"positions": GIVEN.positions[:5]}, r"positions: shape must be \[19\], got \[5\]"),
        ({"positions": GIVEN.positions.float()}, "positions: dtype must be one of"),
        ({"slot_mapping": GIVEN.slots.int()}, "slot_mapping: dtype must be one of"),
        ({"q": WHOLE[:, :768].view(19, 4, 192), "kv": WHOLE[:, 767:1343]}, "q: shares memory with kv"),
        ({"kv": WHOLE.view(-1)[: 16 * 576].view(1, 16, 576)[0], "pages": WHOLE.view(-1)[: 16 * 576].view(1, 16, 576)},
         "pages: shares memory with kv"),
    ],
)  # fmt: skip
def test_what_is_refused(change: dict[str, object], message: str) -> None:
    tokens = 16 if "pages" in change and "kv" in change else 19
    given: dict[str, object] = {
        "q": GIVEN.q[:tokens],
        "kv": GIVEN.kv,
        "positions": GIVEN.positions[:tokens],
        "cos_sin": GIVEN.cos_sin,
        "pages": GIVEN.pages(),
        "slot_mapping": GIVEN.slots[:tokens],
        "norm": GIVEN.norm,
        "eps": EPS,
    }
    with pytest.raises(KernelArgumentError, match=message):
        rotate_append_latent(**(given | change))  # type: ignore[arg-type]
