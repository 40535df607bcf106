"""mla_decode of few heads cut by load, whose launches begin while those before them end."""

import time

import pytest
import torch

from kernels.backend import Backend
from kernels.graph_capture import graph_capture
from kernels.mla_decode import MlaDecodePlan, mla_decode
from tests.kernels.compare import assert_output, assert_same_bits
from tests.kernels.mla_inputs import SCALE, make_latents
from tests.kernels.test_mla_decode import latent_queries, truth
from tests.kernels.test_mla_decode_by_load import LENGTHS, assert_at_rest, attend, planned

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("lengths", [[8191] * 64, [4166, 64, 2999, 1], [5000]])
@pytest.mark.parametrize("heads", [32, 16])
def test_launches_of_a_graph_wait_for_each_other(heads: int, lengths: list[int]) -> None:
    """They begin while those before them end, share a plan's buffers, and some read what was just written.

    Sequences' last latents are written between them, as by a model's layers.
    """
    case = make_latents([(length - 1, 1) for length in lengths], 1, device="cuda")
    plan = planned(case, heads)
    queries = [latent_queries(case, heads) * (1 + layer / 8) for layer in range(6)]
    outs = [torch.empty_like(q[:, :, :512].contiguous()) for q in queries]
    where = (case.pages, case.block_tables, case.seqlens_k)
    options = {"scale": SCALE, "max_seqlen_k": max(lengths), "plan": plan}
    page, slot = ((case.seqlens_k - 1) // case.pages.shape[1]).long(), (case.seqlens_k - 1) % case.pages.shape[1]
    page = case.block_tables.gather(1, page[:, None])[:, 0].long()
    newest = case.pages[page, slot]

    def step(wait: bool) -> None:
        case.pages[page, slot] = newest
        for layer, (q, out) in enumerate(zip(queries, outs, strict=True)):
            if layer % 2:
                q[:, :, :512] = outs[layer - 1]
                case.pages[page, slot, :512] = outs[layer - 1][:, 0]
            mla_decode(q, *where, out=out, **options)
            if wait:
                torch.cuda.synchronize()

    step(wait=True)
    wanted = [out.clone() for out in outs]
    graph = torch.cuda.CUDAGraph()
    with graph_capture(graph):
        step(wait=False)
    for _ in range(50):
        for out in outs:
            out.zero_()
        graph.replay()
        for out, right in zip(outs, wanted, strict=True):
            assert_same_bits(out, right)
    assert_at_rest(plan)


@pytest.mark.parametrize("left", [-(1 << 20), 1 << 20])
@pytest.mark.parametrize("heads", [32, 16])
def test_no_result_depends_on_the_pace(heads: int, left: int) -> None:
    """Programs find that all of them are behind, or that none is."""
    case = make_latents([(8190, 1)] * 64, 1, device="cuda")
    q, plan = latent_queries(case, heads), planned(case, heads)
    assert plan.begins_early(64) and int(plan.counts[0]) <= plan.programs
    wanted, _ = attend(case, q, Backend.GLUON, plan)
    plan.arrivals[3] = left
    out, _ = attend(case, q, Backend.GLUON, plan)
    assert_same_bits(out, wanted)
    assert int(plan.arrivals[3]) == left


@pytest.mark.parametrize("page_tokens", [8, 64])
@pytest.mark.parametrize(("heads", "lengths"), [(16, [1000] * 70), (32, [8192] * 64), (8, [65, 64, 7, 193] * 17)])
def test_what_the_launch_before_writes_late_is_seen(heads: int, lengths: list[int], page_tokens: int) -> None:
    """It begins meanwhile, and asks for latents by whatever is in the plan and in the block table then."""
    from tests.kernels.late_writer import write_late

    case = make_latents([(length - 1, 1) for length in lengths], 1, device="cuda", page_tokens=page_tokens)
    q, plan = latent_queries(case, heads), planned(case, heads)
    assert plan.folds_together(len(lengths)) and plan.begins_early(len(lengths))
    out = torch.empty_like(q[:, :, :512].contiguous())
    options = {"scale": SCALE, "max_seqlen_k": max(lengths), "plan": plan, "out": out}

    def attended() -> torch.Tensor:
        return mla_decode(q, case.pages, case.block_tables, case.seqlens_k, **options).clone()

    wanted = attended()
    assert_output(wanted, truth(case, q)[0])
    shorter = MlaDecodePlan(len(lengths), max(lengths), heads, by_load=True)
    shorter.prepare(case.seqlens_k.flip(0) // 2)
    wrong_pages = torch.randint_like(case.block_tables, -(1 << 31), (1 << 31) - 1)
    found = [
        (plan.items, shorter.items),
        (plan.firsts, shorter.firsts),
        (case.block_tables, wrong_pages),
        (case.block_tables, case.block_tables.flip(0).contiguous()),
        (q.view(torch.int32), torch.zeros_like(q.view(torch.int32))),
    ]
    for written, before in found:
        right = written.clone()
        written.copy_(before)
        torch.cuda.synchronize()
        write_late[(1,)](right, written, written.numel(), 500_000, num_warps=4)
        assert_same_bits(attended(), wanted)
        assert_at_rest(plan)


@pytest.mark.parametrize("lengths", [[8191] * 64, LENGTHS])
def test_programs_without_room_are_not_waited_for_in_vain(lengths: list[int]) -> None:
    """Another stream's launch holds most multiprocessors until attention has ended, which it does on those left."""
    from tests.kernels.held_multiprocessors import HeldMultiprocessors

    case = make_latents([(length - 1, 1) for length in lengths], 1, device="cuda")
    q = latent_queries(case, 16)
    plan = planned(case, 16)
    assert (int(plan.counts[2]) > 0) == (lengths == LENGTHS)  # where programs meet, and where first parts merge others
    (wanted,) = attend(case, q, Backend.GLUON, plan, wants_lse=False)  # no kernel is loaded later: that would wait
    held = HeldMultiprocessors(100)
    done = torch.cuda.Event()
    (out,) = attend(case, q, Backend.GLUON, plan, wants_lse=False)
    done.record()
    deadline_s = time.monotonic() + 20
    while not done.query() and time.monotonic() < deadline_s:
        time.sleep(0.001)
    ended_first = done.query() and held.holds()
    held.release()
    assert ended_first
    assert_same_bits(out, wanted)
    assert_at_rest(plan)
