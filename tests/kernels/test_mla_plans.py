"""The plans of latent attention, made on the device: every part of the work once, the longest first."""

import pytest
import torch

from kernels.backend import Backend
from kernels.errors import KernelArgumentError
from kernels.mla_decode import LEAF, MlaDecodePlan
from kernels.mla_decode.plan import ROWS
from kernels.mla_prefill import BLOCK, MlaPrefillPlan
from tests.kernels.inputs import running_sums
from tests.kernels.target import Target

LENGTHS = [5 * LEAF + 1, 0, 3, LEAF, 2 * LEAF + 7]
QUERIES = [1, 2, 1, 4, 3]


def planner(target: Target) -> str:
    if target.backend is Backend.REFERENCE:
        pytest.skip("the references need no plan")
    return target.device


@pytest.mark.parametrize("programs", [1, 4, 500])
@pytest.mark.parametrize("heads", [16, 128])
def test_decode_attends_to_every_leaf_of_every_tile_once(target: Target, heads: int, programs: int) -> None:
    device = planner(target)
    plan = MlaDecodePlan(5, 6 * LEAF, heads, max_q_tokens=4, programs=programs, device=device)
    plan.prepare(torch.tensor(LENGTHS, dtype=torch.int32, device=device), running_sums(QUERIES, device))
    items = plan.items[: int(plan.counts)].tolist()
    done, slots = [], []
    for seq, tile, leaf, leaves, slot in items:
        done += [(seq, tile, leaf + i) for i in range(leaves)]
        slots += [slot] if slot >= 0 else []
        assert slot < 0 or leaves == 1
        # A shared-out tile's slots follow each other: that is where the fold looks.
        first = int(plan.bases[seq])
        assert slot == (-1 if first < 0 else first + tile * max(-(-LENGTHS[seq] // LEAF), 1) + leaf)
    wanted = [
        (seq, tile, leaf)
        for seq, (length, new) in enumerate(zip(LENGTHS, QUERIES, strict=True))
        for tile in range(-(-new * heads // ROWS))
        for leaf in range(max(-(-length // LEAF), 1))
    ]
    assert sorted(done) == wanted
    assert sorted(slots) == list(range(len(slots))) and len(slots) <= plan.acc.shape[0]
    whole = [leaves for *_, leaves, slot in items if slot < 0]
    assert whole == sorted(whole, reverse=True)
    # One program has no one to share with; of 500 most would have nothing to do.
    assert bool(slots) == (programs > 1) or programs == 4


@pytest.mark.parametrize("mode", ["aligned", "offsets", "all"])
def test_prefill_orders_every_tile_by_its_keys(target: Target, mode: str) -> None:
    device = planner(target)
    new, keys, offsets = [300, 0, 1, 129, 128], [700, 50, 1, 129, 900], [400, 9, -1, 0, 0]
    plan = MlaPrefillPlan(5, 600, device=device)
    given = torch.tensor(offsets, dtype=torch.int32, device=device) if mode == "offsets" else None
    plan.prepare(running_sums(new, device), running_sums(keys, device), given, causal=mode != "all")
    tiles = [(seq, tile) for seq, count in enumerate(new) for tile in range(-(-count // BLOCK))]

    def seen(seq: int, tile: int) -> int:
        offset = {"aligned": keys[seq] - new[seq], "offsets": offsets[seq], "all": keys[seq]}[mode]
        return max(min(keys[seq], offset + min(new[seq], (tile + 1) * BLOCK)), 0)

    order = [tuple(pair) for pair in plan.order[: int(plan.counts[0])].tolist()]
    assert order == sorted(tiles, key=lambda pair: -seen(*pair))
    assert plan.counts[1:].tolist() == [0, 0]


def test_what_does_not_fit_is_refused_by_name() -> None:
    with pytest.raises(KernelArgumentError, match="max_seqs: must be in"):
        MlaPrefillPlan(1025, 10, device="cpu")
    with pytest.raises(KernelArgumentError, match="cu_seqlens_q: the plan holds 1"):
        MlaPrefillPlan(1, 10, device="cpu").prepare(running_sums([1, 2]), running_sums([1, 2]))
    plan = MlaDecodePlan(1, 10, 16, programs=4, device="cpu")
    with pytest.raises(KernelArgumentError, match="seqlens_k: the plan holds 1"):
        plan.prepare(torch.zeros(2, dtype=torch.int32))
    with pytest.raises(KernelArgumentError, match="plan: holds"):
        plan.check(1, 11, 16, 1)
    with pytest.raises(KernelArgumentError, match="plan: made for 16 heads"):
        plan.check(1, 10, 128, 1)
