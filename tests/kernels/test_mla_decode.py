"""mla_decode: one latent is key and value at once; any number of query tokens, any page size, the same bits."""

import pytest
import torch

from kernels.attention import with_lse
from kernels.backend import Backend
from kernels.errors import KernelArgumentError
from kernels.graph_capture import graph_capture
from kernels.mla_decode import MlaDecodePlan, mla_decode
from kernels.mla_decode import plan as plan_module
from kernels.mla_decode.tree_sizes import tree_of
from kernels.softmax import LOG2_E
from tests.kernels.compare import assert_lse, assert_output, assert_same_bits
from tests.kernels.conftest import INTERPRETING
from tests.kernels.inputs import running_sums
from tests.kernels.mla_inputs import LATENT, SCALE, WIDTH, LatentCase, attention_truth, make_latents, permuted
from tests.kernels.target import HOPPER, Target

# The longer of the two trees' leaves: two of the shorter.
LEAF = tree_of(128, one_query=True).leaf
# Lengths around a tile's 64 latents, a leaf's end, and far beyond it; where it costs little, in a second group.
LENGTHS = [1, 63, 64, 65, LEAF, LEAF + 1, 2 * LEAF + 100] + ([] if INTERPRETING else [4 * LEAF + 70])
HEADS = 2 if INTERPRETING else 16


def latent_queries(case: LatentCase, heads: int = HEADS) -> torch.Tensor:
    rng = torch.Generator().manual_seed(1)
    q = torch.randn((sum(case.new), heads, WIDTH), generator=rng)
    return q.to(case.pages.dtype).to(case.pages.device)


def make(lengths: list[tuple[int, int]], target: Target, **options: object) -> LatentCase:
    return make_latents(lengths, 1, device=target.device, **options)


def run(
    case: LatentCase, q: torch.Tensor, target: Target, plan: MlaDecodePlan | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    single = case.new == [1] * len(case.new)
    return with_lse(
        mla_decode,
        q,
        case.pages,
        case.block_tables,
        case.seqlens_k,
        scale=SCALE,
        cu_seqlens_q=None if single else case.cu_q,
        max_q_tokens=max(case.new),
        plan=plan,
        backend=target.backend,
    )


def truth(case: LatentCase, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    parts = []
    for seq, cached in enumerate(case.cached):
        k = case.latents[seq].unsqueeze(1).expand(-1, q.shape[1], -1)
        parts.append(attention_truth(q[case.rows(seq)], k, k[..., :LATENT], cached))
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts], dim=1)


@pytest.mark.parametrize("page_tokens", [16] if INTERPRETING else [1, 8, 16, 64])
def test_one_token_of_each_sequence(target: Target, page_tokens: int) -> None:
    case = make([(length - 1, 1) for length in LENGTHS], target, page_tokens=page_tokens)
    q = latent_queries(case)
    (out, lse), (wanted, wanted_lse) = run(case, q, target), truth(case, q)
    assert_output(out, wanted)
    assert_lse(lse, wanted_lse)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes(target: Target, dtype: torch.dtype) -> None:
    if dtype not in target.dtypes:
        pytest.skip("tensor cores have no fp32")
    case = make([(70, 1), (20, 1)], target, dtype=dtype)
    q = latent_queries(case)
    assert_output(run(case, q, target)[0], truth(case, q)[0])


@pytest.mark.parametrize("heads", [2] if INTERPRETING else [8, 16, 48, 128])
def test_several_tokens_of_each_sequence(target: Target, heads: int) -> None:
    case = make([(60, 4), (0, 3), (LEAF - 2, 8), (17, 1)], target)
    q = latent_queries(case, heads)
    (out, lse), (wanted, wanted_lse) = run(case, q, target), truth(case, q)
    assert_output(out, wanted)
    assert_lse(lse, wanted_lse)


@pytest.mark.parametrize("heads", [2] if INTERPRETING else [16, 128])
def test_sequences_without_a_query_among_others(target: Target, heads: int) -> None:
    """First, in the middle and last: no row moves."""
    case = make([(9, 0), (60, 4), (0, 0), (LEAF + 3, 0), (17, 1), (30, 0)], target)
    q = latent_queries(case, heads)
    (out, lse), (wanted, wanted_lse) = run(case, q, target), truth(case, q)
    assert_output(out, wanted)
    assert_lse(lse, wanted_lse)


def test_a_padding_row_gives_zero(target: Target) -> None:
    case = make([(9, 1), (12, 1)], target)
    lengths = case.seqlens_k * torch.tensor([1, 0], dtype=torch.int32, device=target.device)
    q = latent_queries(case)
    out, lse = with_lse(mla_decode, q, case.pages, case.block_tables, lengths, scale=SCALE, backend=target.backend)
    assert_same_bits(out[0], run(case, q, target)[0][0])
    assert not out[1].any() and bool((lse[:, 1] == float("-inf")).all())


def test_bits_do_not_depend_on_other_requests_pages_or_the_number_of_queries(target: Target) -> None:
    if target.backend is Backend.REFERENCE:
        pytest.skip("a CPU product's last bits depend on its shape")
    case = make([(LEAF + 70, 4), (30, 2), (500, 1)], target)
    q = latent_queries(case)
    out, lse = run(case, q, target)
    moved = run(permuted(case), q, target)
    assert_same_bits(moved[0], out)
    assert_same_bits(moved[1], lse)
    for seq, (cached, new) in enumerate(case.lengths):
        for token in range(new):
            row = case.rows(seq).start + token
            length = torch.tensor([cached + token + 1], dtype=torch.int32, device=target.device)
            one = with_lse(
                mla_decode,
                q[row : row + 1],
                case.pages,
                case.block_tables[seq : seq + 1],
                length,
                scale=SCALE,
                cu_seqlens_q=running_sums([1], target.device),
                backend=target.backend,
            )
            assert_same_bits(one[0][0], out[row])
            assert_same_bits(one[1][:, 0], lse[:, row])


@pytest.mark.parametrize("heads", [HEADS, 2 * HEADS])
def test_bits_of_a_decode_step_do_not_depend_on_other_requests(target: Target, heads: int) -> None:
    if target.backend is Backend.REFERENCE:
        pytest.skip("a CPU product's last bits depend on its shape")
    case = make([(2 * LEAF + 70, 1), (30, 1), (500, 1)], target)
    q = latent_queries(case, heads)
    out, lse = run(case, q, target)
    for seq in range(3):
        rows = slice(seq, seq + 1)
        where = (case.pages, case.block_tables[rows], case.seqlens_k[rows])
        one = with_lse(mla_decode, q[rows], *where, scale=SCALE, backend=target.backend)
        assert_same_bits(one[0], out[rows])
        assert_same_bits(one[1], lse[:, rows].contiguous())


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "new"), [(16, 1), (16, 3), (8, 1), (48, 1), (128, 1)])
def test_bits_do_not_depend_on_who_computes_which_part(heads: int, new: int) -> None:
    target = _cuda()
    case = make([(9 * LEAF + 3, new), (LEAF + 1, 1), (7, 1)], target)
    q = latent_queries(case, heads)
    wanted = run(case, q, target)
    for programs in (1, 2, 3, 4, 1000):
        several = None if new == 1 else new
        plan = MlaDecodePlan(3, 10 * LEAF, heads, max_q_tokens=several, programs=programs)
        plan.prepare(case.seqlens_k, case.cu_q if several else None)
        for part, right in zip(run(case, q, target, plan), wanted, strict=True):
            assert_same_bits(part, right)


@pytest.mark.gpu
@pytest.mark.parametrize("page_tokens", [8, 64])
@pytest.mark.parametrize("heads", [20, 64, 128])
def test_bits_do_not_depend_on_whether_weights_have_a_launch_of_their_own(
    monkeypatch: pytest.MonkeyPatch, heads: int, page_tokens: int
) -> None:
    target = _cuda()
    lengths = [0, *LENGTHS, 2 * LEAF - 1, 10 * LEAF]
    case = make([(max(length - 1, 0), 1) for length in lengths], target, page_tokens=page_tokens)
    given = torch.tensor(lengths, dtype=torch.int32, device=target.device)
    q = latent_queries(case, heads)
    for first, group in [(first, 1) for first in range(len(lengths))] + [(3, 2), (6, 2), (0, 3), (1, 5)]:
        rows = slice(first, first + group)
        where = (case.pages, case.block_tables[rows], given[rows])
        longest = max(*lengths[rows], 1)
        results = []
        for most, least_wide in ((0, 999), (200, 999), (200, 1)):
            monkeypatch.setattr(plan_module, "MOST_LEAVES_APART", most)
            monkeypatch.setattr(plan_module, "LEAST_LEAVES_WIDE", least_wide)
            plan = MlaDecodePlan(group, longest, heads)
            assert plan.has_weights_apart(group) == (most > 0)
            plan.prepare(given[rows])
            options = {"scale": SCALE, "max_seqlen_k": longest, "plan": plan, "backend": target.backend}
            results.append(with_lse(mla_decode, q[rows], *where, **options))
        for out, lse in results[1:]:
            assert_same_bits(out, results[0][0])
            assert_same_bits(lse, results[0][1])


@pytest.mark.gpu
def test_weights_of_a_launch_of_their_own_follow_a_captured_plan() -> None:
    """Lengths that end anywhere, the last pages full of NaN."""
    target = _cuda()
    case = make([(8 * LEAF - 1, 1)], target, page_tokens=64)
    q = latent_queries(case, 128)
    lengths = case.seqlens_k.clone()
    plan = MlaDecodePlan(1, 8 * LEAF, 128)
    assert plan.has_weights_apart(1)
    out = torch.empty((1, 128, LATENT), dtype=q.dtype, device="cuda")
    where = (case.pages, case.block_tables, lengths)

    def step() -> None:
        plan.prepare(lengths)
        mla_decode(q, *where, scale=SCALE, max_seqlen_k=8 * LEAF, plan=plan, out=out)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with graph_capture(graph):
        for _ in range(4):
            step()
    for shorter in (8 * LEAF, 5 * LEAF + 7, LEAF + 1, 70, 1, 0):
        tail = case.block_tables[0, shorter // 64 :].long()
        case.pages[tail[1:]] = float("nan")
        case.pages[tail[:1], shorter % 64 :] = float("nan")
        lengths.fill_(shorter)
        out.fill_(float("nan"))
        graph.replay()
        whole = MlaDecodePlan(1, 100 * LEAF, 128)
        assert not whole.has_weights_apart(1)
        whole.prepare(lengths)
        assert_same_bits(out, mla_decode(q, *where, scale=SCALE, plan=whole))


@pytest.mark.gpu
@pytest.mark.parametrize("rise", [0.0, 0.3, 5.0, -5.0, 60.0])
def test_bases_that_move_change_no_bit(monkeypatch: pytest.MonkeyPatch, rise: float) -> None:
    """Each kernel chooses its own bases; however many programs there are, the outputs have the same bits.

    rise: by how much the scores, as exponents of 2, grow from one tile to the next; 0: they are random and far apart.
    """
    target = _cuda()
    case = make([(9 * LEAF + 3, 1), (3 * LEAF, 1)], target, page_tokens=64)
    q = latent_queries(case, 128) * (1 if rise else 100)
    if rise:
        # One element of a query, 1 / (scale * log2 e), meets the number of its tile, times the rise.
        q[..., LATENT] = 1 / (SCALE * LOG2_E)
        for seq, latents in enumerate(case.latents):
            tile = torch.arange(latents.shape[0], device=target.device) // 64
            latents[:, LATENT] = (tile * rise).to(latents.dtype)
            pages = case.block_tables[seq, : -(-latents.shape[0] // 64)].long()
            rows = torch.zeros((len(pages) * 64, WIDTH), dtype=latents.dtype, device=target.device)
            rows[: latents.shape[0]] = latents
            case.pages[pages] = rows.view(-1, 64, WIDTH)
    wanted, wanted_lse = truth(case, q)
    results = []
    for programs, most in ((1, 0), (3, 0), (1000, 0), (1000, 1000)):
        monkeypatch.setattr(plan_module, "MOST_LEAVES_APART", most)
        plan = MlaDecodePlan(2, 10 * LEAF, 128, programs=programs)
        assert plan.has_weights_apart(2) == (most > 0)
        plan.prepare(case.seqlens_k)
        results.append(run(case, q, target, plan))
    assert_output(results[0][0], wanted)
    torch.testing.assert_close(results[0][1].double(), wanted_lse.double(), rtol=1e-4, atol=1e-2)
    for out, lse in results[1:]:
        assert_same_bits(out, results[0][0])
        assert_same_bits(lse, results[0][1])


@pytest.mark.gpu
def test_a_captured_plan_and_attention_follow_the_lengths() -> None:
    target = _cuda()
    case = make([(3 * LEAF, 1), (64, 1)], target)
    q = latent_queries(case)
    lengths = case.seqlens_k.clone()
    plan = MlaDecodePlan(2, 4 * LEAF, HEADS)
    out = torch.empty((2, HEADS, LATENT), dtype=q.dtype, device="cuda")

    def step() -> None:
        plan.prepare(lengths)
        mla_decode(q, case.pages, case.block_tables, lengths, scale=SCALE, plan=plan, out=out)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with graph_capture(graph):
        step()
    for shorter in ([3 * LEAF + 1, 65], [LEAF, 0], [17, 64]):
        lengths.copy_(torch.tensor(shorter))
        graph.replay()
        wanted = mla_decode(q, case.pages, case.block_tables, lengths, scale=SCALE)
        assert_same_bits(out, wanted)


@pytest.mark.gpu
def test_a_pool_beyond_32_bits() -> None:
    target = _cuda()
    case = make([(150, 1), (40, 1)], target, page_tokens=64)
    q = latent_queries(case)
    count, size = case.pages.shape[0], case.pages[0].numel()
    stride = (2**31 // (count - 1) // WIDTH + 65) * WIDTH
    pool = torch.empty((count - 1) * stride + size, dtype=q.dtype, device="cuda")
    far = pool.as_strided(case.pages.shape, (stride, WIDTH, 1))
    far.copy_(case.pages)
    assert (count - 1) * stride > 2**31
    got = mla_decode(q, far, case.block_tables, case.seqlens_k, scale=SCALE)
    assert_same_bits(got, run(case, q, target)[0])


def _cuda() -> Target:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return HOPPER


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 4, 512)}, "q: shape must be"),
        ({"pages": torch.zeros(9, 16, 512)}, "latent: must be less than the 512 of a row"),
        ({"latent": 0}, "latent: must be less than the 576 of a row of pages, and positive"),
        ({"pages": torch.zeros(9, 24, WIDTH)}, "pages: page_tokens must be a power of two"),
        ({"q": torch.zeros(3, 4, WIDTH)}, "q: 3 tokens"),
        ({"max_q_tokens": 2}, "need cu_seqlens_q"),
        ({"max_seqlen_k": 65}, "max_seqlen_k: must be in 0..64"),
        ({"seqlens_k": torch.zeros(2, dtype=torch.int64)}, "seqlens_k: dtype"),
        ({"block_tables": torch.zeros(3, 4, dtype=torch.int32)}, "block_tables: shape"),
        ({"out": torch.zeros(2, 4, WIDTH)}, "out: shape"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "q": torch.zeros(2, 4, WIDTH),
        "pages": torch.zeros(9, 16, WIDTH),
        "block_tables": torch.zeros(2, 4, dtype=torch.int32),
        "seqlens_k": torch.zeros(2, dtype=torch.int32),
        "scale": SCALE,
    }
    with pytest.raises(KernelArgumentError, match=message):
        mla_decode(**{**arguments, **change})
