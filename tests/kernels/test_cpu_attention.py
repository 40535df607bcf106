"""What a worker on a CPU attends with, scaled_dot_product_attention: near the truth, and the same bits in any batch."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from kernels.attention import with_lse
from kernels.backend import Backend
from kernels.decode_attention import decode_attention
from kernels.decode_attention import reference as decode_reference
from kernels.errors import KernelArgumentError
from kernels.fp8 import E4M3, dequantise, quantise
from kernels.layout import KvLayout
from kernels.prefill_attention import prefill_attention
from kernels.prefill_attention import reference as prefill_reference
from tests.kernels.compare import assert_output, assert_same_bits
from tests.kernels.dense import dense_attention
from tests.kernels.inputs import CaseShape, PagedCase, make_case

FP32 = CaseShape(dtype=torch.float32)
# Around pages of 16, blocks of 32 rows and the 512 keys that one pass of the library's loop takes.
LENGTHS = [1, 15, 16, 17, 31, 32, 33, 255, 511, 512, 513, 1100]
RAGGED = [(0, 33), (16, 5), (48, 16), (37, 70), (0, 1), (130, 1), (16, 0), (500, 45), (1023, 2)]


@pytest.fixture
def no_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """A case that falls back raises."""
    monkeypatch.delattr(decode_reference, "decode_attention")
    monkeypatch.delattr(prefill_reference, "prefill_attention")


def decode(case: PagedCase, backend: Backend = Backend.AUTO, **scales: torch.Tensor) -> torch.Tensor:
    where = (case.q, case.k_pages, case.v_pages, case.block_tables, case.seqlens_k)
    return decode_attention(*where, window=case.window, layout=case.layout, backend=backend, **scales)


def prefill(case: PagedCase, backend: Backend = Backend.AUTO, **scales: torch.Tensor) -> torch.Tensor:
    where = (case.q, case.k_pages, case.v_pages, case.block_tables, case.cu_seqlens_q, case.cu_seqlens_k)
    options = {"window": case.window, "layout": case.layout, "backend": backend}
    return prefill_attention(*where, case.max_seqlen_q, **options, **scales)


@pytest.mark.usefixtures("no_reference")
@pytest.mark.parametrize("window", [0, 1, 20, 600])
@pytest.mark.parametrize("layout", list(KvLayout))
def test_near_dense_attention_in_every_layout(layout: KvLayout, window: int) -> None:
    shape = replace(FP32, layout=layout, window=window, shared_pages=0 if window else 1)
    decoding, prompts = make_case([(length - 1, 1) for length in LENGTHS], shape), make_case(RAGGED, shape)
    assert_output(decode(decoding), dense_attention(decoding)[0])
    assert_output(prefill(prompts), dense_attention(prompts)[0])


@pytest.mark.usefixtures("no_reference")
@pytest.mark.parametrize("page_tokens", [1, 8, 64, 256])
@pytest.mark.parametrize(("q_heads", "kv_heads", "dim"), [(1, 1, 16), (6, 2, 24), (7, 1, 128)])
def test_near_dense_attention_with_other_pages_and_heads(
    page_tokens: int, q_heads: int, kv_heads: int, dim: int
) -> None:
    shape = replace(FP32, page_tokens=page_tokens, q_heads=q_heads, kv_heads=kv_heads, dim=dim)
    decoding, prompts = make_case([(length - 1, 1) for length in LENGTHS[-4:]], shape), make_case(RAGGED, shape)
    assert_output(decode(decoding), dense_attention(decoding)[0])
    assert_output(prefill(prompts), dense_attention(prompts)[0])


@pytest.mark.usefixtures("no_reference")
def test_scores_that_lie_far_apart() -> None:
    """Most weights are too small for fp32, and one key takes nearly everything."""
    decoding, prompts = make_case([(32, 1), (299, 1)], FP32), make_case([(37, 70)], FP32)
    for case, attend in ((decoding, decode), (prompts, prefill)):
        sharp = replace(case, q=case.q * 20)
        assert_output(attend(sharp), dense_attention(sharp)[0])


@pytest.mark.usefixtures("no_reference")
@pytest.mark.parametrize("window", [0, 20])
def test_fp8_pages_have_the_bits_of_fp32_ones_with_their_numbers(window: int) -> None:
    shape = replace(FP32, window=window)
    decoding, prompts = make_case([(length - 1, 1) for length in LENGTHS], shape), make_case(RAGGED, shape)
    k_scales, v_scales = torch.tensor([0.125]), torch.tensor([0.03])
    scales = {"k_scales": k_scales, "v_scales": v_scales}
    for case, attend in ((decoding, decode), (prompts, prefill)):
        k, v = quantise(case.k_pages, k_scales), quantise(case.v_pages, v_scales)
        wide = dequantise(k, k_scales, torch.float32), dequantise(v, v_scales, torch.float32)
        wanted = attend(replace(case, k_pages=wide[0], v_pages=wide[1]))
        assert_same_bits(attend(replace(case, k_pages=k, v_pages=v), **scales), wanted)


def test_a_scale_for_each_token_takes_the_reference() -> None:
    case = make_case([(20, 1)], FP32)
    one = torch.ones(case.k_pages.shape[0], case.k_pages.shape[2], case.k_pages.shape[1])
    narrow = replace(case, k_pages=case.k_pages.to(E4M3), v_pages=case.v_pages.to(E4M3))
    scales = {"k_scales": one, "v_scales": one}
    for attend in (decode, prefill):
        assert_same_bits(attend(narrow, **scales), attend(narrow, Backend.REFERENCE, **scales))


@pytest.mark.usefixtures("no_reference")
def test_packed_queries_are_the_same() -> None:
    case = make_case(RAGGED, FP32)
    packed = case.q.unflatten(1, (2, 2)).transpose(0, 1).contiguous()
    where = (case.k_pages, case.v_pages, case.block_tables, case.cu_seqlens_q, case.cu_seqlens_k, case.max_seqlen_q)
    assert_same_bits(prefill_attention(packed, *where), prefill(case))


@pytest.mark.usefixtures("no_reference")
@pytest.mark.parametrize("window", [0, 1, 20, 600])
def test_no_other_sequence_changes_a_bit_of_a_decode_row(window: int) -> None:
    case = make_case([(length - 1, 1) for length in LENGTHS], replace(FP32, window=window))
    together = decode(case)
    for seq in range(len(LENGTHS)):
        alone = replace(
            case,
            q=case.q[seq : seq + 1],
            block_tables=case.block_tables[seq : seq + 1],
            cu_seqlens_k=case.cu_seqlens_k[seq : seq + 2] - case.cu_seqlens_k[seq],
        )
        assert_same_bits(decode(alone), together[seq : seq + 1])


@pytest.mark.usefixtures("no_reference")
@pytest.mark.parametrize("window", [0, 1, 20, 600])
@pytest.mark.parametrize("heads", [(4, 2, 64), (6, 2, 24)])
def test_no_cut_changes_a_bit_of_a_prompt(window: int, heads: tuple[int, int, int]) -> None:
    q_heads, kv_heads, dim = heads
    whole = make_case([(0, 1100)], replace(FP32, q_heads=q_heads, kv_heads=kv_heads, dim=dim))
    whole = replace(whole, window=window)
    expected = prefill(whole)
    for cuts in ([0, 1, 2, 3, 640, 1100], [0, 512, 1100], [0, 77, 78, 333, 1024, 1100], [0, 1099, 1100]):
        for start, stop in pairwise(cuts):
            chunk = replace(
                whole,
                lengths=((start, stop - start),),
                q=whole.q[start:stop],
                cu_seqlens_q=torch.tensor([0, stop - start], dtype=torch.int32),
                cu_seqlens_k=torch.tensor([0, stop], dtype=torch.int32),
            )
            assert_same_bits(prefill(chunk), expected[start:stop])


@pytest.mark.usefixtures("no_reference")
def test_no_other_prompt_changes_a_bit() -> None:
    case = make_case(RAGGED, FP32)
    together = prefill(case)
    for seq in range(len(RAGGED)):
        first, stop = case.cu_seqlens_q[seq : seq + 2].tolist()
        if first == stop:
            continue
        alone = replace(
            case,
            lengths=(case.lengths[seq],),
            q=case.q[first:stop],
            block_tables=case.block_tables[seq : seq + 1],
            cu_seqlens_q=case.cu_seqlens_q[seq : seq + 2] - first,
            cu_seqlens_k=case.cu_seqlens_k[seq : seq + 2] - case.cu_seqlens_k[seq],
        )
        assert_same_bits(prefill(alone), together[first:stop])


@pytest.mark.usefixtures("no_reference")
def test_rows_of_no_sequence() -> None:
    """Decode rows without keys give 0; what lies behind the last prompt is not written."""
    decoding, prompts = make_case([(39, 1), (299, 1)], FP32), make_case([(5, 7)], FP32)
    lengths = torch.cat([decoding.seqlens_k, torch.zeros_like(decoding.seqlens_k)])
    tables = torch.cat([decoding.block_tables, torch.zeros_like(decoding.block_tables)])
    queries = torch.cat([decoding.q, torch.full_like(decoding.q, float("nan"))])
    out = decode_attention(queries, decoding.k_pages, decoding.v_pages, tables, lengths)
    assert_same_bits(out[:2], decode(decoding))
    assert not out[2:].any()
    kept = torch.full((9, 4, 64), 3.0)
    bounds = (prompts.block_tables, prompts.cu_seqlens_q, prompts.cu_seqlens_k, 7)
    padded = torch.cat([prompts.q, prompts.q[:2]])
    prefill_attention(padded, prompts.k_pages, prompts.v_pages, *bounds, out=kept)
    assert_same_bits(kept[:7], prefill(prompts))
    assert bool((kept[7:] == 3.0).all())


def test_what_it_does_not_take_goes_to_the_reference() -> None:
    half = make_case([(39, 1)], CaseShape())
    assert_same_bits(decode(half), decode(half, Backend.REFERENCE))
    assert_same_bits(prefill(half), prefill(half, Backend.REFERENCE))
    case = make_case([(39, 1)], FP32)
    where = (case.q, case.k_pages, case.v_pages, case.block_tables, case.seqlens_k)
    out, lse = with_lse(decode_attention, *where)
    expected, expected_lse = with_lse(decode_attention, *where, backend=Backend.REFERENCE)
    assert_same_bits(out, expected)
    assert_same_bits(lse, expected_lse)
    sinks = torch.full((4,), 5.0)
    for options in ({"softcap": 2.0}, {"sinks": sinks}):
        assert_same_bits(
            decode_attention(*where, **options), decode_attention(*where, **options, backend=Backend.REFERENCE)
        )


def test_wrong_lengths_are_refused() -> None:
    case = make_case([(30, 10)], FP32)
    where = (case.q, case.k_pages, case.v_pages, case.block_tables, case.cu_seqlens_q, case.cu_seqlens_k)
    with pytest.raises(KernelArgumentError, match="sequence 0: 10 queries"):
        prefill_attention(*where, 9)
    decoding = make_case([(39, 1)], FP32)
    with pytest.raises(KernelArgumentError, match="40 keys, max_seqlen_k is 39"):
        decode_attention(
            decoding.q, decoding.k_pages, decoding.v_pages, decoding.block_tables, decoding.seqlens_k, max_seqlen_k=39
        )
