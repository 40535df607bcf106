"""index_logits: every key of a sequence, cached ones too, for every query, up to its own position (R24, R25)."""

from __future__ import annotations

import pytest
import torch

from kernels.backend import Backend
from kernels.errors import KernelArgumentError
from kernels.fp8 import E4M3
from kernels.index_logits import index_logits
from kernels.key_rows import KeyRows
from tests.kernels.compare import assert_same_bits
from tests.kernels.conftest import INTERPRETING
from tests.kernels.sparse_inputs import SparseCase, make_sparse, random_rows
from tests.kernels.target import Target

# Decode rows, a fresh prompt, one behind a cached prefix, one without new tokens; around the kernel's 128 keys.
LENGTHS = [(129, 1), (0, 1), (0, 20), (250, 9), (40, 0), (127, 2)]
HEADS, DIM = 5, 24


def make(target: Target, **options: object) -> SparseCase:
    return make_sparse(LENGTHS, DIM, num_decode=2, device=target.device, **options)


def inputs(case: SparseCase, heads: int = HEADS, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    """Queries as slices of wider rows, in fp8 where keys are, and weights of both signs."""
    device = str(case.pages.device)
    wide = random_rows(case.num_tokens, heads * DIM + 8, dtype=dtype, device=device)
    wide = wide if case.scales is None else wide.to(E4M3)
    weights = random_rows(case.num_tokens, heads, dtype=torch.float32, device=device, seed=2)
    return wide[:, 8:].view(case.num_tokens, heads, DIM), weights


def run(case: SparseCase, q: torch.Tensor, weights: torch.Tensor, target: Target, **more: object) -> torch.Tensor:
    out = torch.full((q.shape[0], case.max_keys), float("nan"), device=q.device)
    options = {"scales": case.scales, "out": out, "backend": target.backend, **more}
    return index_logits(q, weights, case.pages, case.block_tables, case.rows, case.max_keys, **options)


def assert_logits(got: torch.Tensor, case: SparseCase, q: torch.Tensor, weights: torch.Tensor, least: int = 0) -> None:
    """What a row sees is the definition's, in fp64; nothing else was written."""
    for token in range(case.num_tokens):
        keys = case.seen(token)
        count = keys.shape[0] if keys.shape[0] > least else 0
        wanted = weights[token].double().cpu() @ (q[token].double().cpu() @ keys[:count].double().T).relu()
        row = got[token].cpu()
        # Hopper's tensor cores add products of fp8 up with 14 bits.
        tolerance = 1e-4 if case.scales is None or not got.is_cuda else 1e-2
        torch.testing.assert_close(row[:count].double(), wanted, rtol=1e-5, atol=tolerance)
        assert row[count:].isnan().all(), f"row {token} was written behind its {count} keys"


@pytest.mark.parametrize("page_tokens", [1, 16, 64])
def test_every_row_sees_its_sequence_up_to_itself(target: Target, page_tokens: int) -> None:
    case = make(target, page_tokens=page_tokens)
    q, weights = inputs(case)
    assert_logits(run(case, q, weights, target), case, q, weights)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes(target: Target, dtype: torch.dtype) -> None:
    if dtype not in target.dtypes:
        pytest.skip("tensor cores have no fp32")
    case = make(target, dtype=dtype)
    q, weights = inputs(case, 16, dtype)
    assert_logits(run(case, q, weights, target), case, q, weights)


@pytest.mark.parametrize("backend", [Backend.REFERENCE, Backend.AUTO])
def test_the_route_of_a_cpu_in_fp32(backend: Backend) -> None:
    case = make_sparse(LENGTHS, DIM, num_decode=2, dtype=torch.float32)
    q, weights = inputs(case, 16, torch.float32)
    target = Target("cpu", backend)
    assert_logits(run(case, q, weights, target), case, q, weights)
    assert_logits(run(case, q, weights, target, least_keys=20), case, q, weights, 20)


def test_products_of_fp8_and_a_scale_for_each_key(target: Target) -> None:
    case = make(target, fp8=True)
    q, weights = inputs(case)
    assert_logits(run(case, q, weights, target), case, q, weights)


def test_rows_with_few_keys_are_left_out(target: Target) -> None:
    case = make(target)
    q, weights = inputs(case)
    assert_logits(run(case, q, weights, target, least_keys=20), case, q, weights, 20)
    assert run(case, q, weights, target, least_keys=case.max_keys).isnan().all()


def test_bits_depend_on_the_query_and_the_key_alone(target: Target) -> None:
    """Other rows are left away, which moves the tiles, and the pages lie elsewhere."""
    if target.backend is Backend.REFERENCE:
        pytest.skip("a CPU product's last bits depend on its shape")
    case = make(target)
    q, weights = inputs(case)
    together = run(case, q, weights, target)
    for token in (0, 3, 25, 30) if INTERPRETING else range(case.num_tokens):
        rows = KeyRows(*(part[token : token + 1] for part in case.rows))
        alone = index_logits(
            q[token : token + 1], weights[token : token + 1], case.pages, case.block_tables, rows, case.max_keys,
            backend=target.backend,
        )  # fmt: skip
        count = int(rows.num_keys)
        assert_same_bits(alone[0, :count], together[token, :count])


def test_tiles_of_many_rows_give_the_bits_of_tiles_of_one(target: Target) -> None:
    if target.backend is Backend.REFERENCE:
        pytest.skip("has no tiles")
    case = make_sparse([(100, 1), (9, 1), (60, 130), (0, 70), (0, 60)], DIM, num_decode=2, device=target.device)
    q, weights = inputs(case)
    together = run(case, q, weights, target)
    assert case.num_tokens > 256
    few = slice(100, 140)
    part = index_logits(
        q[few], weights[few], case.pages, case.block_tables, case.rows.part(few), case.max_keys, backend=target.backend
    )
    for row, token in enumerate(range(100, 140)):
        count = int(case.rows.num_keys[token])
        assert_same_bits(part[row, :count], together[token, :count])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 4)}, "q: shape must be"),
        ({"q": torch.zeros(2, 200, 8)}, "q: must have 1 to 128 heads"),
        ({"weights": torch.zeros(2, 3)}, "weights: shape must be"),
        ({"weights": torch.zeros(2, 4, dtype=torch.bfloat16)}, "weights: dtype"),
        ({"pages": torch.zeros(9, 16, 9)}, "pages: shape must be"),
        ({"pages": torch.zeros(9, 16, 8).to(E4M3)}, "scales: fp8 pages need them"),
        ({"pages": torch.zeros(9, 16, 8).to(E4M3), "scales": torch.zeros(9, 16)}, "q: dtype must be pages'"),
        ({"q": torch.zeros(2, 4, 8).to(E4M3)}, "pages: dtype"),
        ({"scales": torch.zeros(9, 16)}, "scales: fp8 pages need them and others take none"),
        ({"rows": KeyRows(torch.zeros(3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32))}, "rows.sequences"),
        ({"rows": KeyRows(torch.zeros(2, dtype=torch.int32), torch.zeros(2))}, "rows.num_keys: dtype"),
        ({"block_tables": torch.zeros(3, 4)}, "block_tables: dtype"),
        ({"max_keys": 65}, "max_keys: must be in 0..64"),
        ({"least_keys": -1}, "least_keys: must not be negative"),
        ({"out": torch.zeros(2, 63)}, "out: shape"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "q": torch.zeros(2, 4, 8),
        "weights": torch.zeros(2, 4),
        "pages": torch.zeros(9, 16, 8),
        "block_tables": torch.zeros(3, 4, dtype=torch.int32),
        "rows": KeyRows(torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)),
        "max_keys": 64,
    }
    with pytest.raises(KernelArgumentError, match=message):
        index_logits(**{**arguments, **change})
