"""A launch again and again on a Hopper GPU, with the same bits each time.

The copy engine refills memory that threads have read. Where it may do so too early, a launch in a hundred has a few
wrong numbers: one launch against a reference finds nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels.backend import is_hopper
from kernels.block_scan import plan_scan
from kernels.index_logits import index_logits
from kernels.mamba2_scan import mamba2_scan
from kernels.mla_decode import MlaDecodePlan, mla_decode
from tests.kernels import test_mamba2_scan as mamba2
from tests.kernels.mla_inputs import SCALE, WIDTH, make_latents
from tests.kernels.sparse_inputs import make_sparse
from tests.kernels.state_inputs import StateRow, begins, keys, make_pool, make_slots, placed
from tests.kernels.test_sparse_gluon import INDEX_DIM, index_inputs

# Of index_logits' launches 0.7 % were wrong: all of them right would have a chance of 1 in 30,000.
NUM_LAUNCHES = 1500

Launch = Callable[[], tuple[torch.Tensor, ...]]


def index_launch(fp8: bool, cached: int = 3470) -> Launch:
    case = make_sparse([(cached, 1024)], INDEX_DIM, page_tokens=32, device="cuda", fp8=fp8)
    q, weights = index_inputs(case, 64)
    max_keys = cached + 1024
    # Logits behind a row's keys are not written.
    out = torch.zeros(case.num_tokens, max_keys, device="cuda")

    def launch() -> tuple[torch.Tensor, ...]:
        index_logits(q, weights, case.pages, case.block_tables, case.rows, max_keys, scales=case.scales, out=out)
        return (out,)

    return launch


def mamba2_launch(sizes: mamba2.Heads) -> Launch:
    """Without a gate, where 0.2 to 0.6 % of the launches had wrong rows."""
    rows = [StateRow(8192)]
    slots, count = make_slots(rows)
    given = mamba2.layer(8192, sizes, torch.bfloat16)
    x, b, c = given.x.cuda(), given.b.cuda(), given.c.cuda()
    steps, skip = given.steps("cuda"), given.skip("cuda")
    pool = make_pool(slots, rows, count, sizes.state, torch.float32).cuda()
    plan = plan_scan(begins(rows).cuda(), keys([0], rows).cuda(), placed(slots, "cuda"), 8192)

    def launch() -> tuple[torch.Tensor, ...]:
        states = pool.clone()
        out = mamba2_scan(x, b, c, steps, states, plan, skip=skip)
        return out, states.nan_to_num(nan=7.0)

    return launch


def mla_decode_launch() -> Launch:
    """One sequence, whose scores have a launch of their own."""
    case = make_latents([(8190, 1)], 1, device="cuda", page_tokens=64)
    q = torch.randn(1, 128, WIDTH, generator=torch.Generator().manual_seed(1)).to(case.pages.dtype).cuda()
    plan = MlaDecodePlan(1, 8192, 128)
    assert plan.has_weights_apart(1)
    plan.prepare(case.seqlens_k)

    def launch() -> tuple[torch.Tensor, ...]:
        return (
            mla_decode(q, case.pages, case.block_tables, case.seqlens_k, scale=SCALE, max_seqlen_k=8192, plan=plan),
        )

    return launch


LAUNCHES = {
    "index_logits": lambda: index_launch(fp8=False),
    "index_logits in wide blocks": lambda: index_launch(fp8=False, cached=30_000),
    "index_logits of fp8 keys": lambda: index_launch(fp8=True),
    "mla_decode of one sequence": mla_decode_launch,
    "mamba2_scan with a skip": lambda: mamba2_launch(mamba2.Heads(1, 128, 64, 128)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", LAUNCHES)
def test_each_launch_has_the_bits_of_the_first(name: str) -> None:
    if not torch.cuda.is_available() or not is_hopper(torch.device("cuda", 0)):
        pytest.skip("needs a Hopper GPU")
    launch = LAUNCHES[name]()
    wanted = [each.clone() for each in launch()]
    num_wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(NUM_LAUNCHES):
        # Counted on the device: launches that wait for the host never meet each other.
        for got, first in zip(launch(), wanted, strict=True):
            num_wrong += (got != first).any()
    assert num_wrong.item() == 0
