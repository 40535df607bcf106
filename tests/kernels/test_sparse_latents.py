"""sparse_latent_attention and mla_sparse: attention over chosen latents, for any number of heads."""

from __future__ import annotations

import pytest
import torch

from kernels.backend import Backend
from kernels.errors import KernelArgumentError
from kernels.key_rows import KeyRows
from kernels.mla import mla_absorbed, mla_sparse
from kernels.sparse_latent_attention import sparse_latent_attention
from kernels.top_k import top_k
from tests.kernels.compare import assert_output, assert_same_bits
from tests.kernels.conftest import INTERPRETING
from tests.kernels.mla_inputs import TINY, attention_truth
from tests.kernels.sparse_inputs import SparseCase, make_sparse, random_rows
from tests.kernels.target import Target

LENGTHS = [(129, 1), (0, 1), (0, 20), (250, 9), (40, 0), (127, 2)]
LATENT, ROPE, K, SCALE = 48, 16, 40, 0.2
WIDTH = LATENT + ROPE


def make(target: Target, **options: object) -> SparseCase:
    return make_sparse(LENGTHS, WIDTH, num_decode=2, device=target.device, **options)


def chosen_of(case: SparseCase, k: int = K) -> torch.Tensor:
    """Any choice, in ascending order."""
    logits = random_rows(case.num_tokens, case.max_keys, dtype=torch.float32, device=str(case.pages.device), seed=4)
    return top_k(
        logits, case.rows.num_keys, k, backend=Backend.REFERENCE if logits.device.type == "cpu" else Backend.AUTO
    )


def queries(case: SparseCase, heads: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return random_rows(case.num_tokens, heads, WIDTH, dtype=dtype, device=str(case.pages.device))


def run(case: SparseCase, q: torch.Tensor, chosen: torch.Tensor, target: Target) -> torch.Tensor:
    return sparse_latent_attention(
        q, case.pages, case.block_tables, case.rows, chosen, scale=SCALE, latent=LATENT, backend=target.backend
    )


def truth(case: SparseCase, q: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    outs = []
    for token in range(case.num_tokens):
        keys = case.seen(token)
        rows = keys[chosen[token, : keys.shape[0]].long().cpu()].double().unsqueeze(1).expand(-1, q.shape[1], -1)
        outs.append(attention_truth(q[token : token + 1].cpu(), rows, rows[..., :LATENT], rows.shape[0], SCALE)[0])
    return torch.cat(outs).to(q.device)


def assert_sparse(got: torch.Tensor, case: SparseCase, q: torch.Tensor, chosen: torch.Tensor) -> None:
    """Every row of a sequence is near the truth, padding is zeros."""
    live = case.rows.num_keys > 0
    assert_output(got[live], truth(case, q, chosen)[live])
    assert not got[~live].any()


@pytest.mark.parametrize("heads", [2, 20] if INTERPRETING else [1, 8, 20, 64, 128])
def test_any_number_of_heads(target: Target, heads: int) -> None:
    case = make(target)
    q, chosen = queries(case, heads), chosen_of(case)
    assert_sparse(run(case, q, chosen, target), case, q, chosen)


@pytest.mark.parametrize("page_tokens", [1, 64])
def test_pages_of_other_sizes(target: Target, page_tokens: int) -> None:
    case = make(target, page_tokens=page_tokens)
    q, chosen = queries(case, 4), chosen_of(case, 33)
    assert_sparse(run(case, q, chosen, target), case, q, chosen)


@pytest.mark.parametrize("backend", [Backend.REFERENCE, Backend.AUTO])
def test_the_route_of_a_cpu_in_fp32(backend: Backend) -> None:
    case = make_sparse(LENGTHS, WIDTH, num_decode=2, dtype=torch.float32)
    q, chosen = queries(case, 6, torch.float32), chosen_of(case)
    assert_sparse(run(case, q, chosen, Target("cpu", backend)), case, q, chosen)


def test_bits_do_not_depend_on_other_rows(target: Target) -> None:
    case = make(target)
    q, chosen = queries(case, 20), chosen_of(case)
    together = run(case, q, chosen, target)
    for token in (0, 3, 25, 30, case.num_tokens - 1):
        one = slice(token, token + 1)
        alone = sparse_latent_attention(
            q[one], case.pages, case.block_tables, case.rows.part(one), chosen[one],
            scale=SCALE, latent=LATENT, backend=target.backend,
        )  # fmt: skip
        assert_same_bits(alone, together[one])


def test_all_chosen_is_dense_attention(target: Target) -> None:
    """Decode rows over everything, against the dense op, with the projections around both."""
    case = make_sparse([(129, 1), (0, 1), (63, 1)], TINY.width, num_decode=3, device=target.device)
    heads = 3
    q = random_rows(3, heads, TINY.head, device=target.device)
    kv_b = random_rows(heads * (TINY.nope + TINY.value), TINY.latent, device=target.device, seed=3) * 0.2
    rows = case.rows.part(slice(0, 3))
    chosen = top_k(torch.zeros(3, case.max_keys, device=target.device), rows.num_keys, 200, backend=target.backend)
    sparse = mla_sparse(q, case.pages, kv_b, case.block_tables, rows, chosen, backend=target.backend)
    dense = mla_absorbed(q, case.pages, kv_b, case.block_tables, rows.num_keys, backend=target.backend)
    assert_output(sparse, dense.double())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 4, 511)}, "q: shape must be"),
        ({"latent": 576}, "latent: must be less than the 576 of a row of pages"),
        ({"pages": torch.zeros(9, 16)}, "pages: shape"),
        ({"chosen": torch.zeros(3, 8, dtype=torch.int32)}, "chosen: shape"),
        ({"chosen": torch.zeros(2, 8)}, "chosen: dtype"),
        ({"chosen": torch.zeros(2, 0, dtype=torch.int32)}, "chosen: must have room"),
        ({"block_tables": torch.zeros(3, 4)}, "block_tables: dtype"),
        ({"rows": KeyRows(torch.zeros(3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32))}, "rows.sequences"),
        ({"out": torch.zeros(2, 4, 576)}, "out: shape"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "q": torch.zeros(2, 4, 576),
        "pages": torch.zeros(9, 16, 576),
        "block_tables": torch.zeros(3, 4, dtype=torch.int32),
        "rows": KeyRows(torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)),
        "chosen": torch.zeros(2, 8, dtype=torch.int32),
        "scale": 1.0,
        "latent": 512,
    }
    with pytest.raises(KernelArgumentError, match=message):
        sparse_latent_attention(**{**arguments, **change})
