"""The plan of mla_decode by leaves: every leaf in exactly one item, items longest first.

The plan kernel runs in the interpreter or on a GPU. What the Gluon kernels compute of leaves is integer arithmetic, run
here as plain Python.
"""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from kernels.backend import Backend
from kernels.mla_decode import MlaDecodePlan
from kernels.mla_decode.tree_sizes import FEW_HEADS, TILE, Tree, tree_of
from tests.examples import examples
from tests.kernels.target import Target
from tests.kernels.test_decode_window_plan import Jitted, plain

PROGRAMS = 12
HEADS = (8, 64, 128)
LENGTHS = {
    "one": [8192],
    "nothing": [0],
    "padding among others": [0, 513, 0, 4096, 0],
    "around leaves": [1023, 1024, 1025, 2048, 4096, 4097, 8193],
    "even": [5000] * 16,
    "ragged": [1, 9000, 17, 2048, 40000, 600],
    "one long among short ones": [60000, *[500] * 15],
}


def leaf_of(length: int, tree: Tree, heads: int) -> int:
    """Returns how many latents the leaves of a sequence have, as Tree says: whole tiles, of many heads in pairs."""
    if tree.short is None:
        return tree.leaf
    tiles, leaves = -(-length // TILE), tree.most_leaves(length)
    unit = 1 if heads <= FEW_HEADS else 2
    return -(-tiles // (unit * leaves)) * unit * TILE


@pytest.fixture(scope="module")
def leaf_tiles() -> Jitted:
    """The Gluon kernels' function as plain Python."""
    pytest.importorskip("triton")
    from kernels.mla_decode.hopper import leaves

    scalars = SimpleNamespace(where=lambda holds, a, b: a if holds else b)
    names = {"gl": scalars, "SHORT_LEAVES": leaves.SHORT_LEAVES.value}
    return plain(leaves.leaf_tiles, names)


@hypothesis_settings(max_examples=examples(200), deadline=None)
@given(
    length=st.one_of(
        st.integers(1, 200_000), st.builds(lambda n, by: n * 1024 + by, st.integers(1, 64), st.integers(-1, 1))
    ),
    heads=st.sampled_from(HEADS),
)
def test_leaves_are_as_many_as_a_power_of_two_says(length: int, heads: int, leaf_tiles: Jitted) -> None:
    tree = tree_of(heads, one_query=True)
    tiles = leaf_tiles(length, tree.leaf, tree.short, TILE, heads > FEW_HEADS)
    assert tiles * TILE == leaf_of(length, tree, heads) <= tree.leaf
    leaves = -(-length // (tiles * TILE))
    assert leaves <= tree.most_leaves(length)
    assert tree.most_leaves(length).bit_count() == 1 and tree.most_leaves(length) <= tree.most_leaves(length + 1)
    # No leaf but a lone one is shorter than half of what it may be, but for a tile that makes their number even.
    assert leaves == 1 or tiles >= tree.short // TILE // 2
    assert leaf_tiles(length, 1024, 0, TILE, True) == 16


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("heads", HEADS)
def test_every_leaf_is_in_one_item(target: Target, heads: int, lengths: list[int]) -> None:
    if target.backend is Backend.REFERENCE:
        pytest.skip("the plan has no reference")
    plan = MlaDecodePlan(len(lengths), max(lengths), heads, programs=PROGRAMS, device=target.device)
    plan.prepare(torch.tensor(lengths, dtype=torch.int32, device=target.device))
    count, step = plan.counts[:2].tolist()
    items = plan.items[:count].tolist()
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    sizes = []
    for seq, q_start, q_len, tile, leaf, leaves, length, slot in items:
        assert (q_start, q_len, length) == (seq, 1, lengths[seq])
        found.setdefault((seq, tile), []).append((leaf, leaves))
        per_leaf = leaf_of(max(length, 1), plan.tree, heads)
        sizes.append(min(leaves * per_leaf, max(length, 1) - leaf * per_leaf))
        assert slot < 0 or leaves <= step
    assert sorted(found) == [(seq, tile) for seq in range(len(lengths)) for tile in range(plan.tiles)]
    for (seq, _), parts in found.items():
        length = lengths[seq]
        wanted = max(1, -(-length // leaf_of(max(length, 1), plan.tree, heads)))
        assert [n for leaf, leaves in sorted(parts) for n in range(leaf, leaf + leaves)] == list(range(wanted))
    tiles = [-(-size // TILE) for size in sizes]
    assert tiles == sorted(tiles, reverse=True)
