"""What only a GPU shows: no op waits for the device, and every op can be captured in a graph."""

from collections.abc import Callable

import pytest
import torch

from kernels.append_kv import append_kv, rotate_append_kv
from kernels.attention import with_lse
from kernels.block_scan import ScanPlan, plan_scan
from kernels.causal_conv import causal_conv
from kernels.combine_experts import combine_experts
from kernels.copy_pages import pack_pages, page_row_bytes, unpack_pages
from kernels.copy_states import copy_states
from kernels.decode_attention import decode_attention
from kernels.fp8 import E4M3
from kernels.gated_activation import clamped_swiglu, gelu_mul, silu_mul
from kernels.gated_delta_scan import gated_delta_scan
from kernels.gates import delta_gates, gated_rms_norm, times_sigmoid
from kernels.gather_latent import gather_latent
from kernels.gather_pages import gather_pages, scatter_pages
from kernels.graph_capture import graph_capture
from kernels.grouped_linear import grouped_linear, plan_experts
from kernels.mamba2_scan import Mamba2Steps, mamba2_scan
from kernels.merge_attention_states import merge_attention_states
from kernels.prefill_attention import prefill_attention
from kernels.rms_norm import rms_norm
from kernels.rotate_append_latent import rotate_append_latent
from kernels.route_experts import RoutingRule, route_experts
from kernels.sample_tokens import sample_tokens
from kernels.softcap_logits import softcap_logits
from kernels.state_slots import StateSlots
from kernels.state_update import update_gated_delta, update_mamba2
from kernels.top_logprobs import top_logprobs
from tests.device_waits import no_device_waits
from tests.kernels.compare import assert_same_bits
from tests.kernels.inputs import CaseShape, PagedCase, make_case
from tests.kernels.sampling_inputs import sampled_case
from tests.kernels.state_inputs import MIXED, SCANNED, begins, keys, make_pool, make_slots, placed

LENGTHS = [(40, 9), (0, 20)]


@pytest.fixture
def case() -> PagedCase:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return make_case(LENGTHS, CaseShape(device="cuda"))


def calls(case: PagedCase) -> list[Callable[[], object]]:
    """Every op once, on the case's device; each returns what it made or wrote."""
    device = case.q.device.type
    pages = (case.k_pages, case.v_pages)
    total = case.total_tokens
    k, v = gather_pages(*pages, case.block_tables, case.cu_seqlens_k, total)
    slots = torch.arange(total, device=device)
    own = (torch.zeros_like(case.k_pages), torch.zeros_like(case.v_pages))
    ids = torch.tensor([2, 1], device=device)
    packed = torch.empty(2, page_row_bytes(case.k_pages), dtype=torch.uint8, device=device)
    lengths = case.seqlens_k
    sinks = torch.zeros(4, device=device)
    lse = torch.zeros(4, case.q.shape[0], device=device)
    args = (*pages, case.block_tables)
    codes = (own[0].to(E4M3), own[1].to(E4M3))
    sizes = (case.k_pages.shape[0], k.shape[1], case.page_tokens)
    scales = {name: torch.ones(sizes, device=device) for name in ("k_scales", "v_scales")}
    where = (case.block_tables, case.cu_seqlens_k)
    sums = (case.cu_seqlens_q, case.cu_seqlens_k)
    rows = case.q.flatten(1)
    latent_pages = case.k_pages.flatten(2)
    angles = torch.zeros(total, 2, 32, device=device)
    latents = k.flatten(1)
    latent_places = (slots, angles, own[0].flatten(2), slots)
    norm = {"norm": latents[0, 64:].clone(), "eps": 1e-6}
    sampled = sampled_case(6, 9000, device=device)
    best = sampled.logits.argmax(dim=-1).int()
    return [
        lambda: sample_tokens(*sampled),
        lambda: top_logprobs(sampled.logits, best, 5).top_tokens,
        lambda: append_kv(k, v, *own, slots) or own[0],
        lambda: rotate_append_kv(torch.cat((k, k, k), 1), slots, angles, *own, slots, q_heads=2).packed,
        lambda: rms_norm(rows, rows[0], 1e-5, residual=rows)[0],
        lambda: silu_mul(rows),
        lambda: times_sigmoid(rows, rows[:, :1]),
        lambda: gated_rms_norm(case.q, case.q[0, 0].clone(), 1e-5, rows),
        lambda: delta_gates(rows, rows, *rows[:2].float().unbind())[0],
        lambda: delta_gates(rows, rows[:, :4], rows[0].float(), rows[1, :4].float())[0],
        lambda: softcap_logits(rows, 30.0),
        lambda: expert_layer(rows),
        *state_calls(device),
        lambda: rotate_append_latent(latents.clone()[:, None], latents, *latent_places, **norm) or own[0],
        lambda: (
            rotate_append_latent(latents.clone()[:, None], latents, slots, None, *latent_places[2:], **norm) or own[0]
        ),
        lambda: gather_latent(latent_pages, *where, total),
        lambda: gather_pages(*args, case.cu_seqlens_k, total)[1],
        lambda: scatter_pages(k, v, *own, case.block_tables, case.cu_seqlens_k) or own[1],
        lambda: append_kv(k, v, *codes, slots, **scales) or codes[0],
        lambda: gather_pages(*codes, *where, total, out_dtype=k.dtype, **scales)[1],
        lambda: scatter_pages(k, v, *codes, *where, **scales) or scales["v_scales"],
        lambda: pack_pages(case.k_pages, ids, packed) or packed,
        lambda: unpack_pages(packed, own[0], ids) or own[0],
        lambda: with_lse(prefill_attention, case.q, *args, *sums, case.max_seqlen_q, sinks=sinks)[0],
        lambda: with_lse(decode_attention, case.q[:2], *args, lengths, sinks=sinks)[0],
        lambda: merge_attention_states(case.q, lse, case.q, lse)[0],
    ]


def state_calls(device: str) -> list[Callable[[], object]]:
    """The ops on recurrent states; each call begins with the same pool."""
    slots, count = make_slots(MIXED)
    pool, cu = make_pool(slots, MIXED, count, (3, 512), torch.bfloat16).to(device), begins(MIXED).to(device)
    x, on_device = torch.randn(int(cu[-1]), 512, device=device, dtype=pool.dtype), placed(slots, device)
    ones = torch.ones(1, device=device, dtype=torch.int32)
    return [
        lambda: causal_conv(x, x[:4].T.contiguous(), None, cu, pool.clone(), on_device),
        lambda: copy_states(own := pool.clone(), ones, 2 * ones) or own,
        *recurrent_calls(device),
    ]


def recurrent_calls(device: str) -> list[Callable[[], object]]:
    """Both recurrences, as scans over rows of every kind and as updates of the same rows."""
    rows, first = [row for _, row in SCANNED], [position for position, _ in SCANNED]
    slots, count = make_slots(rows)
    pool = make_pool(slots, rows, count, (4, 32, 32), torch.float32).to(device)
    cu_q, cu_k, on_device = begins(rows).to(device), keys(first, rows).to(device), placed(slots, device)
    tokens = int(cu_q[-1])
    few, many = (torch.randn(tokens, heads, 32, device=device, dtype=torch.bfloat16) for heads in (2, 4))
    gates = torch.rand(tokens, 4, device=device)
    steps = Mamba2Steps(gates, None, -gates[0])
    none = StateSlots(*on_device[:4], *(array[:0] for array in on_device[4:]))
    delta = (few, few, many, -gates, gates)
    by_channel = (*delta[:3], -gates[:, :, None].expand(-1, -1, 32).contiguous(), gates)

    def plan() -> ScanPlan:
        return plan_scan(cu_q, cu_k, on_device, tokens)

    return [
        lambda: gated_delta_scan(*delta, pool.clone(), plan(), norm_eps=1e-6),
        lambda: gated_delta_scan(*by_channel, pool.clone(), plan(), norm_eps=1e-6),
        lambda: mamba2_scan(many, few, few, steps, pool.clone(), plan()),
        lambda: update_gated_delta(*delta, pool.clone(), cu_q, none, norm_eps=1e-6),
        lambda: update_gated_delta(*by_channel, pool.clone(), cu_q, none, norm_eps=1e-6),
        lambda: update_mamba2(many, few, few, steps, pool.clone(), cu_q, none),
    ]


def expert_layer(rows: torch.Tensor) -> torch.Tensor:
    """All ops of an expert layer; its weights are of one number, but each expert's of another."""
    width = rows.shape[1]
    weight = (
        torch.arange(1, 9, device=rows.device, dtype=rows.dtype).view(8, 1, 1).expand(8, width, width).contiguous() / 64
    )
    routing = route_experts(rows[:, :8].float(), RoutingRule(2, renormalise=True))
    plan = plan_experts(routing.expert_ids, 8)
    inner = clamped_swiglu(grouped_linear(rows, weight, plan), limit=7.0, alpha=1.702)
    inner = torch.cat((gelu_mul(torch.cat((inner, inner), 1)), inner), 1)
    return combine_experts(grouped_linear(inner, weight, plan), routing.weights)


@pytest.mark.gpu
def test_no_op_waits_for_the_device(case: PagedCase) -> None:
    """Any copy to the host, and any other wait, raises in this mode."""
    runs = calls(case)
    for run in runs:
        run()  # compiles
    with no_device_waits():
        for run in runs:
            run()


@pytest.mark.gpu
def test_every_op_replays_from_a_graph(case: PagedCase) -> None:
    for run in calls(case):
        wanted = run()
        assert isinstance(wanted, torch.Tensor)
        wanted = wanted.clone()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with graph_capture(graph):
            got = run()
        assert isinstance(got, torch.Tensor)
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(got, wanted)


def test_every_call_is_one_that_its_op_takes() -> None:
    """On a CPU, so that a call which an op has come to refuse is found without a GPU."""
    for run in calls(make_case(LENGTHS, CaseShape(device="cpu"))):
        assert isinstance(run(), torch.Tensor)
