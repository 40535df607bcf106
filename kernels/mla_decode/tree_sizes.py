"""The sizes of mla_decode's summation tree: one for few rows, one for many. A result's bits depend on them."""

from typing import NamedTuple

__all__ = ["TILE", "Tree", "is_few", "tree_of"]

# Up to this many heads a query's rows are the narrow side of the products: see the Hopper kernels.
FEW_HEADS = 16
# Latents that a program attends to at a time.
TILE = 64


class Tree(NamedTuple):
    """How a sequence's sums are made: of leaves of `leaf` latents.

    Where rows are few they are folded in groups, and groups in order; where rows are many, by twos (hopper/nodes.py),
    and a program has up to `leaves_per_group` of a sequence that is shared out.
    """

    leaf: int
    leaves_per_group: int


def is_few(heads: int, one_query: bool) -> bool:
    """Returns whether a call is one for the kernel of few rows: by heads and by the form of the call, never by a
    length."""
    return one_query and heads <= FEW_HEADS


def tree_of(heads: int, one_query: bool) -> Tree:
    """The tree that no batch, no length and no number of queries changes.

    Few rows leave a partial result small enough for short leaves, which small batches need to fill a card, and for
    folding a group in registers; where they are many, each leaf that joins a sum costs a trip of 64 KB.
    """
    return Tree(512, 8) if is_few(heads, one_query) else Tree(1024, 8)
