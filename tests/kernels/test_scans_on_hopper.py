"""The Gluon scans on a Hopper GPU: near the recurrence, invariant; and which layers they take."""

from __future__ import annotations

import pytest
import torch

from kernels.backend import Backend, is_hopper
from kernels.block_scan import GatedDeltaLayer, plan_scan
from kernels.block_scan.hopper import reason_against_case as reason_against_rows
from kernels.errors import KernelArgumentError
from kernels.gated_delta_scan import gated_delta_scan
from kernels.gated_delta_scan.hopper import reason_against_case
from tests.kernels import test_gated_delta_scan as delta
from tests.kernels import test_mamba2_scan as mamba2
from tests.kernels.compare import assert_same_bits
from tests.kernels.recurrences import assert_states, expected
from tests.kernels.scans import check_cuts_on_the_grid, check_rows_of_every_kind
from tests.kernels.state_inputs import POISON, StateRow, begins, keys, make_slots, placed
from tests.kernels.target import HOPPER

DTYPES = [torch.bfloat16, torch.float16]
DELTAS = [
    *(delta.Heads(2, 4, 128, 128), delta.Heads(1, 1, 128, 64)),
    *(delta.Heads(2, 2, 128, 128, True), delta.Heads(1, 2, 128, 64, True)),
]
# Heads of Bamba and Granite 4, of Falcon's hybrids; of 256 values without any option. The last ones are Triton's.
MAMBA2S = [
    *(mamba2.Heads(2, 4, 64, 128), mamba2.Heads(1, 2, 128, 128), mamba2.Heads(1, 1, 256, 128, False)),
    mamba2.Heads(1, 2, 64, 256),
]


@pytest.fixture
def hopper() -> None:
    if not torch.cuda.is_available() or not is_hopper(torch.device("cuda", 0)):
        pytest.skip("needs a Hopper GPU")


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
class TestDelta:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("sizes", DELTAS, ids=str)
    def test_rows_of_every_kind(self, sizes: delta.Heads, dtype: torch.dtype) -> None:
        shape = (sizes.heads, sizes.dim)
        check_rows_of_every_kind(delta.SCAN, HOPPER, sizes, shape, dtype, delta.TOLERANCE[dtype])

    @pytest.mark.parametrize("is_restored", [False, True])
    @pytest.mark.parametrize("sizes", DELTAS, ids=str)
    def test_no_cut_on_the_grid_and_no_company_changes_a_bit(self, sizes: delta.Heads, is_restored: bool) -> None:
        check_cuts_on_the_grid(delta.SCAN, HOPPER, sizes, torch.bfloat16, is_restored)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_equal_keys_that_overwrite_each_other(self, dtype: torch.dtype) -> None:
        """No decay, full strength, one key for all: each value replaces the one before."""
        sizes, rows = delta.Heads(1, 1, 128, 64), [StateRow(128)]
        given, (slots, count) = delta.layer(128, sizes, dtype), make_slots(rows)
        key = given.k[:1].expand(128, 1, 128).contiguous()
        given = given._replace(q=key, k=key, g=torch.zeros_like(given.g), beta=torch.ones(128, 1))
        pool = torch.full((count, *sizes.state), POISON)
        out, after = delta.scanned(given, [0], rows, pool, slots, HOPPER)
        wanted, wanted_pool = expected(delta.truth(given, sizes), slots, rows, begins(rows), pool, (1, 64))
        assert_states(out, wanted, delta.TOLERANCE[dtype])
        assert_states(after, wanted_pool, delta.TOLERANCE[dtype])

    @pytest.mark.parametrize("sizes", DELTAS[::2], ids=str)
    def test_rows_that_are_slices(self, sizes: delta.Heads) -> None:
        """Of a wider projection, behind the last row of which others follow; as it is served."""
        rows = [StateRow(70), StateRow(40)]
        given, (slots, count) = delta.layer(110, sizes, torch.bfloat16), make_slots(rows)
        pool = torch.full((count, *sizes.state), POISON)
        wanted, wanted_pool = delta.scanned(given, [0, 0], rows, pool, slots, HOPPER)
        wide = torch.full((130, 2048), POISON, dtype=torch.bfloat16, device="cuda")
        views, end = [], 8
        for rows_of in given[:3]:
            views.append(wide[:, end : end + rows_of[0].numel()].unflatten(1, rows_of.shape[1:]))
            views[-1][:110] = rows_of.cuda()
            end += rows_of[0].numel()
        others = (torch.cat((rows_of, rows_of[:20])).cuda() for rows_of in given[3:])
        states = pool.cuda()
        plan = plan_scan(begins(rows).cuda(), keys([0, 0], rows).cuda(), placed(slots, "cuda"), 130)
        out = gated_delta_scan(*views, *others, states, plan, norm_eps=1e-6)
        assert_same_bits(out[:110].cpu(), wanted)
        assert not out[110:].any()
        assert_same_bits(states.cpu(), wanted_pool)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
class TestMamba2:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("sizes", MAMBA2S, ids=str)
    def test_rows_of_every_kind(self, sizes: mamba2.Heads, dtype: torch.dtype) -> None:
        shape = (sizes.heads, sizes.dim)
        check_rows_of_every_kind(mamba2.SCAN, HOPPER, sizes, shape, dtype, mamba2.TOLERANCE[dtype])

    @pytest.mark.parametrize("is_restored", [False, True])
    @pytest.mark.parametrize("sizes", MAMBA2S, ids=str)
    def test_no_cut_on_the_grid_and_no_company_changes_a_bit(self, sizes: mamba2.Heads, is_restored: bool) -> None:
        check_cuts_on_the_grid(mamba2.SCAN, HOPPER, sizes, torch.bfloat16, is_restored)


@pytest.mark.parametrize("sizes", DELTAS, ids=str)
def test_layers_of_the_delta_rule_that_are_taken(sizes: delta.Heads) -> None:
    given = delta.layer(3, sizes, torch.bfloat16)
    normed = GatedDeltaLayer(*given, torch.zeros(1, *sizes.state), scale=1.0, norm_eps=1e-6)
    assert reason_against_case(normed) is None
    plain = reason_against_case(normed._replace(norm_eps=None))
    assert plain is None if sizes.by_channel else plain and plain.startswith("keys of any length")


@pytest.mark.parametrize("sizes", MAMBA2S, ids=str)
def test_layers_of_mamba2_that_are_taken(sizes: mamba2.Heads) -> None:
    given = mamba2.layer(3, sizes, torch.bfloat16)
    reason = reason_against_rows(given.c, given.b, given.x)
    assert reason is None if sizes.d_state == 128 else reason == "keys of 256 elements, not 128"


def test_rows_that_are_refused() -> None:
    keys_of, values = torch.zeros(3, 1, 128).half(), torch.zeros(3, 2, 64).half()
    assert reason_against_rows(keys_of, keys_of, values) is None
    assert reason_against_rows(keys_of, keys_of, values.float()) == "torch.float32 values"
    assert reason_against_rows(keys_of, keys_of, values[:, :, :40]) == "values of 40 elements, no multiple of 64"
    odd = torch.zeros(3, 132).half()[:, :128].unflatten(1, (1, 128))
    assert reason_against_rows(odd, keys_of, values) == "queries not aligned to 16 bytes, strides (132, 128, 1)"


def test_gluon_without_a_hopper_says_why() -> None:
    arguments = {**delta.GIVEN._asdict(), "states": delta.POOL, "plan": delta.PLAN}
    with pytest.raises(KernelArgumentError, match="backend GLUON: needs a Hopper GPU, the tensors are on cpu"):
        gated_delta_scan(**arguments, backend=Backend.GLUON)
