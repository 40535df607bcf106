"""Latent attention of a layer: both paths give the truth, and cuts, chunks and other requests change no path's bits."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from kernels.backend import Backend
from kernels.errors import KernelArgumentError
from kernels.head_linear import head_linear
from kernels.latent_dims import LatentDims, check_latent_tiles
from kernels.linear import Route
from kernels.mla import MlaPath, choose_path, mla_absorbed, mla_extend, plan_extend
from kernels.mla.rule import MATERIALISED_FROM
from kernels.mla_decode import hopper as decode_hopper
from kernels.mla_decode.call import MlaDecodeCall
from kernels.mla_prefill import BLOCK
from kernels.mla_prefill import hopper as prefill_hopper
from kernels.mla_prefill.call import MlaPrefillCall
from kernels.project_latents import project_latents
from tests.kernels.compare import assert_output, assert_same_bits
from tests.kernels.conftest import INTERPRETING
from tests.kernels.mla_inputs import (
    DEEPSEEK_V3,
    GLM_FLASH,
    LATENT,
    NOPE,
    ODD,
    TINY,
    LatentCase,
    extend_truth,
    make_latents,
    permuted,
    projected,
)
from tests.kernels.target import Target

MEASURED = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "mla_extend.json"

HEADS = 2 if INTERPRETING else 16
# Parts of tiles and whole ones, for both paths; the interpreter needs a second for each block of keys.
LENGTHS = [(140, 5), (0, 9), (64, 64)] if INTERPRETING else [(300, 5), (0, 40), (133, 1), (64, 64)]
FIXED = [MlaPath.ABSORBED, MlaPath.MATERIALISED]


def make(
    lengths: list[tuple[int, int]], target: Target, dtype: torch.dtype = torch.bfloat16, heads: int = HEADS
) -> LatentCase:
    return make_latents(lengths, heads, device=target.device, dtype=dtype)


def run(case: LatentCase, target: Target, path: MlaPath, chunk_tokens: int = 32768) -> torch.Tensor:
    plan = plan_extend(case.block_tables, case.new, case.cached, case.heads, path=path, chunk_tokens=chunk_tokens)
    # The tiled product keeps a row's bits on any card.
    return mla_extend(case.q, case.pages, case.kv_b, plan, route=Route.TILED, backend=target.backend)


@pytest.mark.parametrize("path", [*FIXED, MlaPath.AUTO])
def test_both_paths_give_the_truth(target: Target, path: MlaPath) -> None:
    for dtype in target.dtypes[:1] if INTERPRETING else target.dtypes:
        # By its own rule the interpreter's short sequences take one path, which the others have shown.
        short = INTERPRETING and path is MlaPath.AUTO
        case = make([(30, 5), (0, 3)] if short else LENGTHS, target, dtype)
        assert_output(run(case, target, path), extend_truth(case))


@pytest.mark.parametrize("path", FIXED)
@pytest.mark.parametrize("dims", [GLM_FLASH, TINY, ODD], ids=["glm", "tiny", "odd"])
def test_other_dims_give_the_truth(target: Target, dims: LatentDims, path: MlaPath) -> None:
    """In chunks, and fp32 too where tensor cores are not needed."""
    lengths = [(140, 5), (0, 3)] if INTERPRETING else LENGTHS
    for dtype in target.dtypes[:1] if INTERPRETING else target.dtypes:
        case = make_latents(lengths, 2, device=target.device, dtype=dtype, dims=dims)
        got = run(case, target, path, chunk_tokens=2 * BLOCK)
        assert got.shape == (case.q.shape[0], 2, dims.value)
        assert_output(got, extend_truth(case))


def test_hopper_takes_one_geometry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of GLM-4.7-Flash take the plain kernel, its decode steps the one for Hopper."""
    for op in ("mla_prefill", "mla_decode"):
        monkeypatch.setattr(f"kernels.{op}.hopper.is_hopper", lambda device: True)
    reasons = {}
    for name, dims in {"v3": DEEPSEEK_V3, "glm": GLM_FLASH, "tiny": TINY}.items():
        case = make_latents([(3, 2)], 2, dims=dims)
        bounds = (case.cu_q, case.cu_k, 2, None, True, 1.0)
        q, pages = case.q.new_zeros(2, 2, dims.width), torch.zeros_like(case.pages)
        decode = MlaDecodeCall(q, pages, case.block_tables, case.seqlens_k, 5, case.cu_q, 2, 1.0, dims.latent)
        prefill = MlaPrefillCall(case.q, *projected(case), *bounds, None, False, False)
        reasons[name] = (prefill_hopper.reason_against(prefill), decode_hopper.reason_against(decode))
    assert reasons == {
        "v3": (None, None),
        "glm": ("needs heads (nope, rope, value) of (128, 64, 128), got (192, 64, 256)", None),
        "tiny": (
            "needs heads (nope, rope, value) of (128, 64, 128), got (16, 8, 24)",
            "needs rows of 512 + 64, got 32 + 8",
        ),
    }


def test_what_the_plain_kernels_have_no_room_for() -> None:
    pytest.importorskip("triton")
    from kernels.mla_prefill.triton import check_dims

    case = make_latents([(3, 2)], 2, dims=LatentDims(520, 64, 128, 512))
    pages = torch.zeros_like(case.pages)
    bounds = (case.cu_q, case.cu_k, 2, None, True, 1.0)
    with pytest.raises(KernelArgumentError, match=r"pages: rows must be at most 512 \+ 64, got 520 \+ 64"):
        check_latent_tiles(pages, case.dims.latent)
    with pytest.raises(KernelArgumentError, match=r"q, v: heads .* of \(128, 64, 512\) .* more than 576"):
        check_dims(MlaPrefillCall(case.q, *projected(case), *bounds, None, False, False))


@pytest.mark.parametrize("chunk_tokens", [2 * BLOCK] if INTERPRETING else [4 * BLOCK, 5 * BLOCK])
def test_chunks_change_no_bit(target: Target, chunk_tokens: int) -> None:
    """Three chunks; the later ones hold nothing of the short sequences."""
    if target.backend is Backend.REFERENCE:
        pytest.skip("a CPU product's last bits depend on its shape")
    case = make([(260, 5), (0, 3)] if INTERPRETING else LENGTHS, target)
    whole = run(case, target, MlaPath.MATERIALISED)
    assert_same_bits(run(case, target, MlaPath.MATERIALISED, chunk_tokens), whole)


@pytest.mark.parametrize("path", FIXED)
def test_cuts_other_requests_and_pages_change_no_bit(target: Target, path: MlaPath) -> None:
    """One prompt at once among others; then alone in parts, the earlier ones cached, on other pages."""
    if target.backend is Backend.REFERENCE:
        pytest.skip("a CPU product's last bits depend on its shape")
    case = make([(0, 2), (20, 82)] if INTERPRETING else [(0, 9), (60, 700)], target)
    whole = run(case, target, path)[case.rows(1)]
    moved = permuted(case)
    cached, total = case.lengths[1][0], case.totals[1]
    for first, stop in pairwise((cached, cached + 77, total - 1, total)):
        rows = slice(case.new[0] + first - cached, case.new[0] + stop - cached)
        plan = plan_extend(moved.block_tables[1:], [stop - first], [first], HEADS, path=path)
        part = mla_extend(case.q[rows], moved.pages, case.kv_b, plan, route=Route.TILED, backend=target.backend)
        assert_same_bits(part, whole[first - cached : stop - cached])


@pytest.mark.parametrize("heads", [HEADS] if INTERPRETING else [HEADS, 32])
def test_decode_has_the_bits_of_an_absorbed_extend(target: Target, heads: int) -> None:
    """But where few heads have a kernel of their own, which gives the same number with other last bits."""
    if target.backend is Backend.REFERENCE:
        pytest.skip("a CPU product's last bits depend on its shape")
    case = make([(70, 3), (9, 2)], target, heads=heads)
    wanted = run(case, target, MlaPath.ABSORBED)
    last = torch.tensor([2, 4], device=target.device)
    got = mla_absorbed(case.q[last], case.pages, case.kv_b, case.block_tables, case.seqlens_k, backend=target.backend)
    if target.device == "cuda" and heads <= 16:
        assert_output(got, wanted[last])
    else:
        assert_same_bits(got, wanted[last])


def test_no_other_rule_costs_less_where_both_paths_were_measured() -> None:
    """By its worst case: the chosen path's time over the faster path's. At most a quarter more, too."""
    rows = json.loads(MEASURED.read_text(encoding="utf-8"))["rows"]

    def worst(materialised_from: int) -> float:
        chosen = ("materialised_us" if row["new"] >= materialised_from else "absorbed_us" for row in rows)
        return max(
            row[path] / min(row["absorbed_us"], row["materialised_us"]) for path, row in zip(chosen, rows, strict=True)
        )

    others = {0, *(row["new"] + 1 for row in rows)}
    assert worst(MATERIALISED_FROM) <= min(1.25, *map(worst, others))


def test_the_rule_looks_at_a_sequence_alone() -> None:
    assert choose_path(MATERIALISED_FROM - 1) is MlaPath.ABSORBED
    assert choose_path(MATERIALISED_FROM) is MlaPath.MATERIALISED
    for path in FIXED:
        assert choose_path(1, path) is path and choose_path(10**6, path) is path
    tables = torch.zeros(4, 100, dtype=torch.int32)
    plan = plan_extend(tables, [1, MATERIALISED_FROM, 900, 2], [50, 0, 3, 60], 16)
    assert [(type(run).__name__, run.first_token, run.last_token) for run in plan.runs] == [
        ("AbsorbedRun", 0, 1),
        ("MaterialisedRun", 1, 901 + MATERIALISED_FROM),
        ("AbsorbedRun", 901 + MATERIALISED_FROM, 903 + MATERIALISED_FROM),
    ]


def test_chunks_end_at_blocks_and_bounds_hold() -> None:
    tables = torch.zeros(3, 100, dtype=torch.int32)
    plan = plan_extend(tables, [10, 20, 30], [1000, 80, 370], 16, path=MlaPath.MATERIALISED, chunk_tokens=3 * 256)
    (run,) = plan.runs
    chunks = run.chunks
    firsts = [chunk.first_positions.tolist() for chunk in chunks]
    # Three need the first chunk, two the second, and one has the third for itself.
    assert firsts == [[0] * 3, [256] * 3, [640] * 3]
    assert [chunk.cu_seqlens_k.diff().tolist() for chunk in chunks] == [[256, 100, 256], [384, 0, 144], [370, 0, 0]]
    assert [chunk.q_offsets.tolist() for chunk in chunks] == [[c - f for c in (1000, 80, 370)] for f in (0, 256, 640)]
    assert all(chunk.num_latents == int(chunk.cu_seqlens_k[-1]) <= 768 for chunk in chunks)


def test_projected_latents_are_views(target: Target) -> None:
    case = make([(30, 7)], target)
    latents = case.latents[0]
    k_nope, k_rope, v = project_latents(latents, case.kv_b, HEADS, NOPE, backend=target.backend)
    for got, wanted in zip((k_nope, v), projected(case)[::2], strict=True):
        torch.testing.assert_close(got.double(), wanted.double(), atol=3e-2, rtol=1e-2)
    assert k_rope.data_ptr() == latents[:, LATENT:].data_ptr()
    assert k_nope.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()


def test_head_linear_takes_slices_and_keeps_rows(target: Target) -> None:
    case = make([(0, 70)], target)
    matrices = case.kv_b.view(HEADS, 2 * NOPE, LATENT)
    into, back = matrices[:, :NOPE], matrices[:, NOPE:].transpose(1, 2)
    wide = case.q.new_full((70, HEADS, LATENT + 64), float("nan"))
    got = head_linear(case.q[..., :NOPE], into, wide[..., :LATENT], backend=target.backend)
    wanted = torch.einsum("thk,hkn->thn", case.q[..., :NOPE].double(), into.double())
    torch.testing.assert_close(got.double(), wanted, atol=3e-2, rtol=1e-2)
    assert wide[..., LATENT:].isnan().all()
    one = head_linear(case.q[66:67, :, :NOPE], into, got.new_empty((1, HEADS, LATENT)), backend=target.backend)
    assert_same_bits(one[0], got[66])
    narrow = head_linear(got.contiguous(), back, case.q.new_empty((70, HEADS, NOPE)), backend=target.backend)
    wanted = torch.einsum("thk,hkn->thn", got.double(), back.double())
    torch.testing.assert_close(narrow.double(), wanted, atol=6e-2, rtol=1e-2)


def test_what_does_not_fit_is_refused_by_name() -> None:
    target = Target("cpu", Backend.REFERENCE)
    case = make([(5, 3)], target)
    plan = plan_extend(case.block_tables, [3], [5], HEADS)
    with pytest.raises(KernelArgumentError, match="q: the plan is for 3 tokens"):
        mla_extend(case.q[:2], case.pages, case.kv_b, plan)
    with pytest.raises(KernelArgumentError, match=r"kv_b: 101 rows are not a multiple of the .* heads of q"):
        mla_extend(case.q, case.pages, case.kv_b[:101], plan)
    with pytest.raises(KernelArgumentError, match="new_tokens, cached_tokens"):
        plan_extend(case.block_tables, [3], [5, 6], HEADS)
    with pytest.raises(KernelArgumentError, match="chunk_tokens: must be at least"):
        plan_extend(case.block_tables, [3], [5], HEADS, chunk_tokens=64)
    with pytest.raises(KernelArgumentError, match="weight: K must be 1 to 0"):
        head_linear(torch.zeros(2, 3, 0), torch.zeros(3, 0, 64), torch.zeros(2, 3, 64))
