"""mla_decode cut by load: the reference's results to within rounding, whichever programs share the work."""

import pytest
import torch

from kernels.attention import with_lse
from kernels.backend import Backend
from kernels.errors import KernelArgumentError
from kernels.graph_capture import graph_capture
from kernels.mla_decode import MlaDecodePlan, mla_decode
from kernels.mla_decode import plan as mla_plan
from tests.kernels.compare import assert_lse, assert_output, assert_same_bits
from tests.kernels.mla_inputs import SCALE, LatentCase, make_latents
from tests.kernels.target import HOPPER, Target
from tests.kernels.test_mla_decode import latent_queries, truth

# On the grid of 64 latents and off it; of several tiles an even and an odd number.
LENGTHS = [1, 63, 64, 65, 128, 129, 193, 1024, 4166, 8192, 8193]


def attend(
    case: LatentCase, q: torch.Tensor, backend: Backend, plan: MlaDecodePlan | None, wants_lse: bool = True
) -> list[torch.Tensor]:
    """Returns outputs and, where they are wanted, log-sum-exps."""
    single = case.new == [1] * len(case.new)
    spans = {} if single else {"cu_seqlens_q": case.cu_q, "max_q_tokens": max(case.new)}
    where, longest = (case.pages, case.block_tables, case.seqlens_k), max(case.totals)
    options = {"scale": SCALE, "max_seqlen_k": longest, "plan": plan, "backend": backend}
    if not wants_lse:
        return [mla_decode(q, *where, **options, **spans)]
    return list(with_lse(mla_decode, q, *where, **options, **spans))


def planned(case: LatentCase, heads: int, programs: int | None = None) -> MlaDecodePlan:
    single = case.new == [1] * len(case.new)
    most = None if single else max(case.new)
    shape = (len(case.new), max(case.totals), heads)
    plan = MlaDecodePlan(*shape, max_q_tokens=most, by_load=True, programs=programs, device=case.pages.device)
    plan.prepare(case.seqlens_k, None if single else case.cu_q)
    return plan


def assert_right(case: LatentCase, heads: int, programs: int | None) -> None:
    q = latent_queries(case, heads)
    plan = planned(case, heads, programs)
    assert plan.by_load
    out, lse = attend(case, q, Backend.GLUON, plan)
    wanted, wanted_lse = truth(case, q)
    assert_output(out, wanted)
    assert_lse(lse, wanted_lse)
    assert_output(attend(case, q, Backend.GLUON, plan, wants_lse=False)[0], wanted)


@pytest.fixture
def cuda() -> str:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return "cuda"


@pytest.mark.gpu
@pytest.mark.parametrize("programs", [None, 1, 3, 30, 1000])
@pytest.mark.parametrize("heads", [128, 64, 48, 32, 20, 16, 8])
def test_one_query_of_each_sequence(cuda: str, heads: int, programs: int | None) -> None:
    assert_right(make_latents([(length - 1, 1) for length in LENGTHS], 1, device=cuda), heads, programs)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [128, 16])
@pytest.mark.parametrize("length", [1, 64, 193, 8192])
def test_a_sequence_alone_is_cut(cuda: str, length: int, heads: int) -> None:
    assert_right(make_latents([(length - 1, 1)], 1, device=cuda), heads, None)


@pytest.mark.gpu
@pytest.mark.parametrize("page_tokens", [8, 16, 32, 64])
@pytest.mark.parametrize(("heads", "new"), [(128, 4), (64, 3), (48, 2), (32, 4)])
def test_several_queries_and_any_page(cuda: str, heads: int, new: int, page_tokens: int) -> None:
    lengths = [(1026, new), (0, new), (60, 1), (4166, new), (9, 0), (63 - new, new)]
    assert_right(make_latents(lengths, 1, device=cuda, page_tokens=page_tokens), heads, None)


@pytest.mark.gpu
def test_a_later_cut_may_outweigh_the_first_by_far(cuda: str) -> None:
    case = make_latents([(9 * 1024, 1), (3 * 1024, 1)], 1, device=cuda)
    q = latent_queries(case, 128) * 100
    out, lse = attend(case, q, Backend.GLUON, planned(case, 128, 40))
    wanted, wanted_lse = truth(case, q)
    assert_output(out, wanted)
    torch.testing.assert_close(lse.double(), wanted_lse.double(), rtol=1e-4, atol=1e-2)


def assert_at_rest(plan: MlaDecodePlan) -> None:
    """Meetings are counted on; the next one's counter, and those of tiles and parts, are 0."""
    if plan.transposed:
        meetings = int(plan.arrivals[0])
        assert not plan.arrivals[1 + meetings % 2] and not plan.arrivals[3] and not plan.stored.any()
    else:
        assert not plan.arrivals.any()


@pytest.mark.gpu
@pytest.mark.parametrize("programs", [17, 60, None])
@pytest.mark.parametrize(("heads", "new"), [(128, 1), (48, 1), (32, 1), (12, 1), (64, 3)])
def test_programs_fold_any_number_of_parts_together(
    cuda: str, monkeypatch: pytest.MonkeyPatch, heads: int, new: int, programs: int | None
) -> None:
    """With the same bits from run to run, and counters that are ready for the next one."""
    monkeypatch.setattr(mla_plan, "LEAST_TILES_TOGETHER", 1)
    case = make_latents([(max(length - new, 0), new) for length in LENGTHS], 1, device=cuda)
    q = latent_queries(case, heads)
    plan = planned(case, heads, programs)
    assert plan.folds_together(len(LENGTHS)) and int(plan.counts[2])
    wanted, wanted_lse = truth(case, q)
    first, first_lse = attend(case, q, Backend.GLUON, plan)
    assert_output(first, wanted)
    assert_lse(first_lse, wanted_lse)
    for _ in range(20):
        out, lse = attend(case, q, Backend.GLUON, plan)
        assert_same_bits(out, first)
        assert_same_bits(lse, first_lse)
    assert_at_rest(plan)


@pytest.mark.gpu
@pytest.mark.parametrize("together", [False, True])
def test_a_captured_plan_follows_the_lengths(cuda: str, monkeypatch: pytest.MonkeyPatch, together: bool) -> None:
    """Padding rows give 0, in a graph whose plan was made for longer sequences; at last nothing is cut."""
    monkeypatch.setattr(mla_plan, "LEAST_TILES_TOGETHER", 1 if together else 1000)
    case = make_latents([(3071, 1), (63, 1), (999, 1)], 1, device=cuda)
    q, lengths = latent_queries(case, 128), case.seqlens_k.clone()
    plan = MlaDecodePlan(4, 4096, 128, by_load=True)
    assert plan.folds_together(3) == together
    out = torch.empty((3, 128, 512), dtype=q.dtype, device=cuda)

    def step() -> None:
        plan.prepare(lengths)
        mla_decode(q, case.pages, case.block_tables, lengths, scale=SCALE, plan=plan, out=out)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with graph_capture(graph):
        step()
    for shorter in ([3072, 64, 1000], [65, 0, 1], [2048, 63, 0], [64, 1, 0]):
        lengths.copy_(torch.tensor(shorter))
        graph.replay()
        replayed = out.clone()
        step()
        assert_same_bits(replayed, out)
        wanted = mla_decode(q, case.pages, case.block_tables, lengths, scale=SCALE, backend=Backend.REFERENCE)
        assert_output(out, wanted.double())
        assert not out[lengths == 0].any()
    assert not int(plan.counts[2])
    assert_at_rest(plan)


def test_other_implementations_take_the_plan_and_keep_their_bits(target: Target) -> None:
    if target == HOPPER:
        pytest.skip("the Gluon kernel follows the plan")
    case = make_latents([(70, 1), (20, 1)], 1, device=target.device)
    q = latent_queries(case, 32)
    plan = MlaDecodePlan(2, max(case.totals), 32, by_load=True, programs=4, device=target.device)
    wanted = attend(case, q, target.backend, None)
    for part, right in zip(attend(case, q, target.backend, plan), wanted, strict=True):
        assert_same_bits(part, right)


@pytest.mark.parametrize("by_load", [False, True])
def test_what_a_plan_does_not_hold_is_refused_before_anything_computes(by_load: bool) -> None:
    """By the reference, too: a plan that is too small must not first be noticed on a GPU."""
    case = make_latents([(70, 1), (20, 1)], 1)
    where = (latent_queries(case, 32), case.pages, case.block_tables, case.seqlens_k)
    plan = MlaDecodePlan(2, 71, 32, by_load=by_load, programs=4, device="cpu")
    mla_decode(*where, scale=SCALE, plan=plan, max_seqlen_k=71)
    with pytest.raises(KernelArgumentError, match="plan: holds"):
        mla_decode(*where, scale=SCALE, plan=plan)  # a row of the block table holds 96
    with pytest.raises(KernelArgumentError, match="plan: made for calls without cu_seqlens_q"):
        mla_decode(*where, scale=SCALE, plan=plan, max_seqlen_k=71, cu_seqlens_q=case.cu_q)
