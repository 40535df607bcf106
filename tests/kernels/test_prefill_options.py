"""prefill_attention's further options: softcap, packed queries, fp8 pages; each alone and with the others."""

from dataclasses import replace

import pytest
import torch

from kernels.attention import with_lse
from kernels.errors import KernelArgumentError
from kernels.fp8 import E4M3, dequantise, quantise
from kernels.layout import KvLayout, page_shape, page_tensor_shapes
from kernels.prefill_attention import PrefillPlan, prefill_attention
from tests.kernels.compare import assert_attention, assert_same_bits
from tests.kernels.dense import dense_attention
from tests.kernels.inputs import CaseShape, PagedCase, make_case, write_tokens
from tests.kernels.target import Target

RAGGED = [(0, 33), (16, 5), (37, 70), (0, 1), (130, 1), (16, 0)]
K_SCALE, V_SCALE = 0.013, 0.021


def packed(q: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[num_tokens, q_heads, dim] as [kv_heads, num_tokens, group, dim]."""
    tokens, heads, dim = q.shape
    return q.view(tokens, kv_heads, heads // kv_heads, dim).transpose(0, 1).contiguous()


def run(case: PagedCase, target: Target, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    given: dict[str, object] = {"q": case.q, "k_pages": case.k_pages, "v_pages": case.v_pages, **options}
    return with_lse(
        prefill_attention,
        block_tables=case.block_tables,
        cu_seqlens_q=case.cu_seqlens_q,
        cu_seqlens_k=case.cu_seqlens_k,
        max_seqlen_q=case.max_seqlen_q,
        window=case.window,
        layout=case.layout,
        backend=target.backend,
        **given,
    )


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("softcap", [1.5, 50.0])
def test_softcap(target: Target, softcap: float, window: int) -> None:
    case = make_case(RAGGED, CaseShape(window=window, device=target.device))
    case = replace(case, q=case.q * 4)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], device=target.device)
    assert_attention(
        run(case, target, softcap=softcap, sinks=sinks), dense_attention(case, sinks=sinks, softcap=softcap)
    )


def test_softcap_bounds_scores_of_any_size(target: Target) -> None:
    case = make_case([(30, 20)], CaseShape(device=target.device))
    case = replace(case, q=case.q * 1000)
    assert_attention(run(case, target, softcap=3.0), dense_attention(case, softcap=3.0))


@pytest.mark.parametrize("group", [1, 3, 4])
def test_packed_queries_give_the_same_bits(target: Target, group: int) -> None:
    case = make_case(RAGGED, CaseShape(q_heads=2 * group, device=target.device))
    out, lse = run(case, target)
    got, got_lse = run(case, target, q=packed(case.q, 2))
    assert_same_bits(got, out)
    assert_same_bits(got_lse, lse)


def coded(case: PagedCase, per_token: bool, target: Target) -> tuple[PagedCase, dict[str, object]]:
    """The batch in fp8 pages, its keys and values as what the codes mean, and the options that go with it."""
    kv_heads = case.keys[0].shape[1]
    options: dict[str, object] = {}
    dense: dict[str, tuple[torch.Tensor, ...]] = {}
    codes: dict[str, list[torch.Tensor]] = {}
    num_pages = case.k_pages.shape[0]
    for name, rows, scale in (("k", case.keys, K_SCALE), ("v", case.values, V_SCALE)):
        scales = torch.full((1,), scale, device=target.device)
        if per_token:
            scales = scale * (1 + torch.rand(num_pages, kv_heads, case.page_tokens, device=target.device))
        own = [scales if not per_token else _rows_scales(case, seq, scales) for seq in range(len(rows))]
        codes[name] = [quantise(row, own_scale) for row, own_scale in zip(rows, own, strict=True)]
        pairs = zip(codes[name], own, strict=True)
        dense[name] = tuple(dequantise(code, own_scale, torch.float32) for code, own_scale in pairs)
        options[f"{name}_scales"] = scales
    shapes = page_tensor_shapes(page_shape(case.k_pages, case.layout), E4M3, case.layout)
    pages = [torch.full(shape, float("nan"), device=target.device).to(E4M3) for shape in shapes]
    for seq, (k, v) in enumerate(zip(codes["k"], codes["v"], strict=True)):
        page, slot = _where(case, seq, k.shape[0])
        write_tokens(pages[0], pages[1], page, slot, k, v, case.layout)
    options |= {"k_pages": pages[0], "v_pages": pages[1]}
    return replace(case, keys=dense["k"], values=dense["v"]), options


def _where(case: PagedCase, seq: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    position = torch.arange(length, device=case.q.device)
    return case.block_tables[seq].long()[position // case.page_tokens], position % case.page_tokens


def _rows_scales(case: PagedCase, seq: int, scales: torch.Tensor) -> torch.Tensor:
    page, slot = _where(case, seq, case.keys[seq].shape[0])
    return scales[page, :, slot].unsqueeze(2)


@pytest.mark.parametrize("per_token", [False, True], ids=["per tensor", "per token"])
@pytest.mark.parametrize("layout", list(KvLayout))
def test_fp8_pages(target: Target, layout: KvLayout, per_token: bool) -> None:
    for dtype in target.dtypes[:2]:
        case = make_case(RAGGED, CaseShape(layout=layout, dtype=dtype, device=target.device))
        case, options = coded(case, per_token, target)
        assert_attention(run(case, target, **options), dense_attention(case))


def test_everything_at_once(target: Target) -> None:
    case = make_case(RAGGED, CaseShape(q_heads=6, window=0, device=target.device))
    case, options = coded(case, True, target)
    sinks = torch.linspace(-2, 2, 6, device=target.device)
    assert_attention(
        run(case, target, **options, q=packed(case.q, 2), sinks=sinks, softcap=5.0),
        dense_attention(case, sinks=sinks, softcap=5.0),
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"softcap": -1.0}, "softcap: must be 0"),
        ({"softcap": float("inf")}, "softcap: must be 0"),
        ({"k_scales": torch.ones(1)}, "k_scales: nothing to scale"),
        ({"q": torch.zeros(3, 20, 2, 64, dtype=torch.bfloat16)}, r"q: shape must be \[2, any, any, 64\]"),
        ({"q": torch.zeros(2, 2, 20, 64, dtype=torch.bfloat16).transpose(1, 2)}, "q: must be contiguous"),
        ({"plan": PrefillPlan(1, 10, 4, 2, 64, device="cpu")}, "plan: holds 1 sequences and 10 tokens"),
        ({"plan": PrefillPlan(1, 20, 8, 2, 64, device="cpu")}, "plan: made for"),
        ({"segment_tokens": 4000}, "segment_tokens: must be 0 or a multiple of 128 from 4096 on, got 4000"),
        (
            {"plan": PrefillPlan(1, 20, 4, 2, 64, device="cpu"), "segment_tokens": 4096},
            "plan: made for segment_tokens 0, got 4096",
        ),
    ],
)
def test_refused_arguments(change: dict[str, object], message: str) -> None:
    from tests.kernels.target import REFERENCE

    with pytest.raises(KernelArgumentError, match=message):
        run(make_case([(4, 20)], CaseShape()), REFERENCE, **change)


def test_a_plan_is_made_of_positive_sizes_and_holds_its_sequences() -> None:
    with pytest.raises(KernelArgumentError, match="q_heads a multiple of kv_heads"):
        PrefillPlan(1, 1, 3, 2, 64, device="cpu")
    plan = PrefillPlan(1, 8, 2, 2, 64, device="cpu")
    lengths = torch.tensor([0, 1, 2], dtype=torch.int32)
    with pytest.raises(KernelArgumentError, match="2 sequences, the plan holds 1"):
        plan.prepare(lengths, lengths)
