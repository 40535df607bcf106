"""Latent attention of a worker on a CPU: near the truth, and the same bits in any batch, for any cut of a prompt."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from kernels.attention import with_lse
from kernels.backend import Backend
from kernels.errors import KernelArgumentError
from kernels.latent_dims import LatentDims
from kernels.mla import MlaPath, mla_absorbed, mla_extend, plan_extend
from kernels.mla_decode import mla_decode, reference
from kernels.mla_prefill import reference as prefill_reference
from tests.kernels.compare import assert_output, assert_same_bits
from tests.kernels.conftest import INTERPRETING
from tests.kernels.mla_inputs import DEEPSEEK_V3, GLM_FLASH, ODD, TINY, LatentCase, extend_truth, make_latents, permuted

pytestmark = pytest.mark.skipif(INTERPRETING, reason="nothing here launches a kernel")

HEADS = 3
PROMPT = 150
OTHERS = [(0, 33), (37, 70), (0, 1), (500, 45), (130, 1)]
# Around pages of 16, blocks of 32 rows and the 512 keys that one pass of the library's loop takes.
LENGTHS = [1, 15, 16, 17, 31, 32, 33, 255, 511, 512, 513, 1100]
DIMS = {"v3": DEEPSEEK_V3, "glm": GLM_FLASH, "tiny": TINY, "odd": ODD}


@pytest.fixture
def no_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """A case that falls back raises."""
    monkeypatch.delattr(reference, "mla_decode")
    monkeypatch.delattr(prefill_reference, "mla_prefill")


@pytest.fixture(params=DIMS)
def dims(request: pytest.FixtureRequest) -> LatentDims:
    return DIMS[request.param]


def make(lengths: list[tuple[int, int]], dims: LatentDims) -> LatentCase:
    return make_latents(lengths, HEADS, dtype=torch.float32, dims=dims)


def extended(case: LatentCase, chunk_tokens: int = 32768) -> torch.Tensor:
    plan = plan_extend(
        case.block_tables, case.new, case.cached, HEADS, path=MlaPath.MATERIALISED, chunk_tokens=chunk_tokens
    )
    return mla_extend(case.q, case.pages, case.kv_b, plan)


def alone(case: LatentCase, seq: int, start: int, stop: int) -> LatentCase:
    """Queries start to stop of a sequence whose whole prompt is new, the tokens before them cached."""
    rows = slice(case.rows(seq).start + start, case.rows(seq).start + stop)
    return replace(
        case, lengths=((start, stop - start),), q=case.q[rows], block_tables=case.block_tables[seq : seq + 1]
    )


def decoded(case: LatentCase) -> torch.Tensor:
    return mla_absorbed(case.q, case.pages, case.kv_b, case.block_tables, case.seqlens_k)


@pytest.mark.usefixtures("no_reference")
def test_near_the_truth(dims: LatentDims) -> None:
    prompts, decoding = make(OTHERS, dims), make([(length - 1, 1) for length in LENGTHS], dims)
    assert_output(extended(prompts), extend_truth(prompts))
    assert_output(decoded(decoding), extend_truth(decoding))


@pytest.mark.usefixtures("no_reference")
@pytest.mark.parametrize("cut", [1, 15, 16, 17, 64, PROMPT])
def test_no_cut_and_no_company_changes_a_bit_of_a_prompt(dims: LatentDims, cut: int) -> None:
    """A prompt in cuts, alone on other pages; its bits are those that it has at once, beside others."""
    case = make([*OTHERS, (0, PROMPT)], dims)
    wanted, moved = extended(case)[case.rows(len(OTHERS))], permuted(case)
    bounds = [*range(0, PROMPT, cut), PROMPT]
    for start, stop in pairwise(bounds):
        assert_same_bits(extended(alone(moved, len(OTHERS), start, stop)), wanted[start:stop])


@pytest.mark.usefixtures("no_reference")
def test_a_cut_beside_others_and_chunks_change_no_bit(dims: LatentDims) -> None:
    whole = make([(0, PROMPT), *OTHERS], dims)
    wanted = extended(whole)
    rows = torch.cat([torch.arange(70, 87), torch.arange(PROMPT, whole.q.shape[0])])
    part = replace(whole, lengths=((70, 17), *OTHERS), q=whole.q[rows])
    assert_same_bits(extended(part), wanted[rows])
    assert_same_bits(extended(part, chunk_tokens=128), wanted[rows])


@pytest.mark.usefixtures("no_reference")
def test_no_company_changes_a_bit_of_a_decode_row(dims: LatentDims) -> None:
    case = make([(length - 1, 1) for length in LENGTHS], dims)
    together, moved = decoded(case), permuted(case)
    for seq in range(len(LENGTHS)):
        rows = slice(seq, seq + 1)
        one = replace(moved, lengths=case.lengths[rows], q=case.q[rows], block_tables=moved.block_tables[rows])
        assert_same_bits(decoded(one), together[rows])


@pytest.mark.usefixtures("no_reference")
def test_scores_that_lie_far_apart() -> None:
    """Most weights are too small for fp32, and one latent takes nearly everything."""
    for lengths, attend in (([(37, 70)], extended), ([(32, 1), (299, 1)], decoded)):
        case = make(lengths, DEEPSEEK_V3)
        sharp = replace(case, q=case.q * 20)
        # Scores of about 100 are known to 1e-5 of themselves.
        torch.testing.assert_close(attend(sharp).double(), extend_truth(sharp), rtol=0.0, atol=2e-4)


@pytest.mark.usefixtures("no_reference")
def test_a_decode_row_without_latents_gives_zero() -> None:
    case = make([(9, 1), (12, 1)], TINY)
    out = mla_absorbed(case.q, case.pages, case.kv_b, case.block_tables, torch.tensor([10, 0], dtype=torch.int32))
    assert_same_bits(out[0], decoded(case)[0])
    assert not out[1].any()


@pytest.mark.usefixtures("no_reference")
def test_an_absorbed_prompt_has_the_bits_of_decoding(dims: LatentDims) -> None:
    """Each token of it, whatever the cut: what a worker asks for whose decoded tokens count as parts of prompts."""
    case = make([(0, 40), (30, 5)], dims)
    plan = plan_extend(case.block_tables, case.new, case.cached, HEADS, path=MlaPath.ABSORBED)
    got = mla_extend(case.q, case.pages, case.kv_b, plan)
    assert_output(got, extend_truth(case))
    for seq, (cached, new) in enumerate(case.lengths):
        for token in range(new):
            row = case.rows(seq).start + token
            length = torch.tensor([cached + token + 1], dtype=torch.int32)
            table = case.block_tables[seq : seq + 1]
            one = mla_absorbed(case.q[row : row + 1], case.pages, case.kv_b, table, length)
            assert_same_bits(one[0], got[row])


def test_what_it_does_not_take_goes_to_the_reference() -> None:
    case = make([(9, 1), (12, 1)], TINY)
    q = torch.randn(2, HEADS, TINY.width)
    where = (q, case.pages, case.block_tables, case.seqlens_k)
    out, lse = with_lse(mla_decode, *where, scale=1.0, latent=TINY.latent)
    wanted, wanted_lse = with_lse(mla_decode, *where, scale=1.0, latent=TINY.latent, backend=Backend.REFERENCE)
    assert_same_bits(out, wanted)
    assert_same_bits(lse, wanted_lse)
    torch.testing.assert_close(mla_decode(*where, scale=1.0, latent=TINY.latent), wanted)


def test_wrong_lengths_are_refused() -> None:
    case = make([(9, 2)], TINY)
    q = torch.randn(1, HEADS, TINY.width)
    with pytest.raises(KernelArgumentError, match=r"sequence 0: 1 queries .* and 11 latents \(max_seqlen_k 10\)"):
        mla_decode(q, case.pages, case.block_tables, case.seqlens_k, scale=1.0, latent=TINY.latent, max_seqlen_k=10)
