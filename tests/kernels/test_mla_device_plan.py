"""Plans of latent prompts made on the device: the bits of a plan from the host, bounds, padding, graphs, memory."""

import pytest
import torch

from kernels.errors import KernelArgumentError
from kernels.graph_capture import graph_capture
from kernels.linear import Route
from kernels.mla import MlaPath, mla_extend, num_chunks, plan_extend, plan_on_device, workspace_bytes
from kernels.mla.plan import CHUNK_TOKENS
from kernels.mla_prefill import BLOCK, MlaPrefillPlan
from tests.kernels.compare import assert_output, assert_same_bits
from tests.kernels.conftest import INTERPRETING
from tests.kernels.inputs import running_sums
from tests.kernels.mla_inputs import DEEPSEEK_V3, TINY, LatentCase, extend_truth, make_latents
from tests.kernels.target import HOPPER, REFERENCE, Target

HEADS = 2
LENGTHS = [(70, 5), (0, 9)] if INTERPRETING else [(130, 5), (0, 140), (64, 64)]
# With chunks of BLOCK + 30: two, three or four of them.
CHUNKED = [[(150, 5), (0, 9)]] if INTERPRETING else [[(150, 5), (0, 140)], [(0, 70), (300, 100), (5, 3)], [(460, 1)]]
PADDING_SEQS, PADDING_TOKENS, SPARE_LATENTS = 2, 3, 40


def from_host(case: LatentCase, target: Target) -> torch.Tensor:
    plan = plan_extend(case.block_tables, case.new, case.cached, case.heads, path=MlaPath.MATERIALISED)
    return mla_extend(case.q, case.pages, case.kv_b, plan, route=Route.TILED, backend=target.backend)


def padded(case: LatentCase, target: Target) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tables and both running sums with sequences that are not there."""
    tables = torch.cat([case.block_tables, case.block_tables.new_zeros(PADDING_SEQS, case.block_tables.shape[1])])
    nothing = [0] * PADDING_SEQS
    sums = (running_sums([*lengths, *nothing], target.device) for lengths in (case.new, case.totals))
    return (tables, *sums)


def test_the_bits_of_a_plan_from_the_host(target: Target) -> None:
    """With bounds that are not reached, and sequences and tokens that are padding."""
    for dims in (DEEPSEEK_V3, TINY):
        case = make_latents(LENGTHS, HEADS, device=target.device, dtype=target.dtypes[0], dims=dims)
        check_bits(case, target, chunk_tokens=CHUNK_TOKENS)


@pytest.mark.parametrize("lengths", CHUNKED, ids=str)
def test_the_bits_of_several_chunks(target: Target, lengths: list[tuple[int, int]]) -> None:
    """A sequence that is cut is so at a multiple of BLOCK of its own; others begin in a later chunk or end in one."""
    for dims in (TINY,) if INTERPRETING else (DEEPSEEK_V3, TINY):
        case = make_latents(lengths, HEADS, device=target.device, dtype=target.dtypes[0], dims=dims)
        check_bits(case, target, chunk_tokens=BLOCK + 30)


def check_bits(case: LatentCase, target: Target, chunk_tokens: int) -> None:
    tokens, latents = case.q.shape[0] + PADDING_TOKENS, sum(case.totals) + SPARE_LATENTS
    count = num_chunks(latents, chunk_tokens)
    buffers = () if target is REFERENCE else [MlaPrefillPlan(8, 2 * tokens, device=target.device) for _ in range(count)]
    bounds = {"num_tokens": tokens, "num_latents": latents, "chunk_tokens": chunk_tokens}
    plan = plan_on_device(*padded(case, target), HEADS, **bounds, prefill_plans=buffers)
    assert [len(run.chunks) for run in plan.runs] == [count]
    q = torch.cat([case.q, case.q.new_full((PADDING_TOKENS, *case.q.shape[1:]), float("nan"))])
    out = torch.full((tokens, HEADS, case.dims.value), 3.0, dtype=q.dtype, device=target.device)
    mla_extend(q, case.pages, case.kv_b, plan, route=Route.TILED, out=out, backend=target.backend)
    assert bool((out[-PADDING_TOKENS:] == 3.0).all())
    if target is REFERENCE:
        assert_output(out[:-PADDING_TOKENS], extend_truth(case))
    else:
        assert_same_bits(out[:-PADDING_TOKENS], from_host(case, target))


def test_a_worker_on_a_cpu_takes_it_as_well() -> None:
    case = make_latents(LENGTHS, HEADS, dtype=torch.float32)
    wanted = plan_extend(case.block_tables, case.new, case.cached, HEADS, path=MlaPath.MATERIALISED)
    bits = mla_extend(case.q, case.pages, case.kv_b, wanted)
    for chunk_tokens in (CHUNK_TOKENS, BLOCK):
        bounds = {"num_tokens": case.q.shape[0], "num_latents": sum(case.totals), "chunk_tokens": chunk_tokens}
        plan = plan_on_device(case.block_tables, case.cu_q, case.cu_k, HEADS, **bounds)
        assert_same_bits(mla_extend(case.q, case.pages, case.kv_b, plan), bits)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "chunk_tokens"), [(16, CHUNK_TOKENS), (128, CHUNK_TOKENS), (16, 256)])
def test_a_captured_extend_follows_the_lengths(heads: int, chunk_tokens: int) -> None:
    """Captured once for the largest batch; each replay has the bits of a plan from the host."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    cases = [
        make_latents(lengths, heads, device="cuda")
        for lengths in ([(300, 200), (0, 180)], [(64, 64), (10, 1)], [(0, 1), (0, 0)], [(5, 150), (190, 3)])
    ]
    tokens, latents = max(sum(case.new) for case in cases), max(sum(case.totals) for case in cases)
    bounds = {"num_tokens": tokens, "num_latents": latents, "chunk_tokens": chunk_tokens}
    buffers = [MlaPrefillPlan(2, tokens) for _ in range(num_chunks(latents, chunk_tokens))]
    width = max(case.block_tables.shape[1] for case in cases)
    pages = max(case.pages.shape[0] for case in cases)
    tables = torch.zeros(2, width, dtype=torch.int32, device="cuda")
    cu_q, cu_k = (torch.zeros(3, dtype=torch.int32, device="cuda") for _ in range(2))
    q = torch.zeros(tokens, *cases[0].q.shape[1:], dtype=torch.bfloat16, device="cuda")
    pool = torch.zeros(pages, *cases[0].pages.shape[1:], dtype=torch.bfloat16, device="cuda")
    out = torch.zeros(tokens, heads, DEEPSEEK_V3.value, dtype=torch.bfloat16, device="cuda")
    kv_b = cases[0].kv_b

    def step() -> None:
        plan = plan_on_device(tables, cu_q, cu_k, heads, **bounds, prefill_plans=buffers)
        mla_extend(q, pool, kv_b, plan, route=Route.TILED, out=out)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with graph_capture(graph):
        step()
    for case in cases:
        count = case.q.shape[0]
        tables[:, : case.block_tables.shape[1]].copy_(case.block_tables)
        pool[: case.pages.shape[0]].copy_(case.pages)
        q[:count].copy_(case.q)
        cu_q.copy_(case.cu_q)
        cu_k.copy_(case.cu_k)
        graph.replay()
        plan = plan_extend(case.block_tables, case.new, case.cached, heads, path=MlaPath.MATERIALISED)
        wanted = mla_extend(case.q, case.pages, kv_b, plan, route=Route.TILED, backend=HOPPER.backend)
        assert_same_bits(out[:count], wanted)


def test_the_memory_of_a_chunk() -> None:
    """What a prompt's own chunk asks for: its gathered rows, and a key part and a value for each head."""
    keys_and_values = 32768 * 128 * (128 + 128) * 2
    assert workspace_bytes(CHUNK_TOKENS, 128, DEEPSEEK_V3, torch.bfloat16) == keys_and_values + 32768 * 576 * 2
    assert workspace_bytes(100, 3, TINY, torch.float32) == 100 * (40 + 3 * 40) * 4
    with pytest.raises(KernelArgumentError, match="chunk_tokens, heads: must be counts"):
        workspace_bytes(-1, 3, TINY, torch.float32)


def test_what_does_not_fit_is_refused_by_name() -> None:
    tables, sums = torch.zeros(2, 4, dtype=torch.int32), running_sums([3, 4])
    with pytest.raises(KernelArgumentError, match="num_latents: must cover the 7 new tokens, got 6"):
        plan_on_device(tables, sums, sums, HEADS, num_tokens=7, num_latents=6)
    buffers = [MlaPrefillPlan(2, 5, device="cpu")]
    with pytest.raises(KernelArgumentError, match="prefill_plans: hold 5 tokens, got num_tokens 7"):
        plan_on_device(tables, sums, sums, HEADS, num_tokens=7, num_latents=7, prefill_plans=buffers)
    with pytest.raises(KernelArgumentError, match="prefill_plans: 2 chunks need as many, got 1"):
        plan_on_device(
            tables, sums, sums, HEADS, num_tokens=5, num_latents=129, chunk_tokens=128, prefill_plans=buffers
        )
    with pytest.raises(KernelArgumentError, match="chunk_tokens: must be at least 128, got 127"):
        plan_on_device(tables, sums, sums, HEADS, num_tokens=7, num_latents=7, chunk_tokens=127)
    with pytest.raises(KernelArgumentError, match=r"cu_seqlens_k: shape must be \[3\], got \[2\]"):
        plan_on_device(tables, sums, running_sums([3]), HEADS, num_tokens=7, num_latents=7)
    with pytest.raises(KernelArgumentError, match="block_tables: shape must be"):
        plan_on_device(tables[:1], sums, sums, HEADS, num_tokens=7, num_latents=7)
