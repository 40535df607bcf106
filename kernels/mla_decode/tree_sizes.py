"""The sizes of mla_decode's summation tree: one for few rows, one for many. A result's bits depend on them."""

from typing import NamedTuple

__all__ = ["SHORT_LEAVES", "TILE", "Tree", "is_transposed", "tree_of"]

# Up to this many heads a query's rows are the narrow side of the products, unless cuts are by load (cut_sizes.py has
# that number): see the Hopper kernels.
MOST_HEADS_TRANSPOSED = 16
# Latents that a program attends to at a time.
TILE = 64
# A sequence of up to this many leaves has leaves of at most Tree.short latents, a longer one of at most Tree.leaf.
SHORT_LEAVES = 4


class Tree(NamedTuple):
    """How a sequence's sums are made: of leaves, of at most `leaf` latents.

    Leaves of `leaf` latents each, where `short` is None. Else a sequence has as many leaves as a power of two says, of
    one length, in whole tiles, of many heads in pairs of them: 5,000 latents are four leaves of 1,280 or eight of 640,
    and so 16 sequences of 128 heads are 128 work items, where leaves of 1,024 are 160, for 132 multiprocessors.

    Where rows are few they are folded in groups, and groups in order; where rows are many, by twos (hopper/nodes.py),
    and a program has up to `leaves_per_group` of a sequence that is shared out.
    """

    leaf: int
    leaves_per_group: int
    short: int | None = None

    def most_leaves(self, length: int) -> int:
        """Returns how many leaves a sequence of up to this many latents has at most."""
        if self.short is None:
            return max(-(-length // self.leaf), 1)
        leaves = 1
        while length > leaves * (self.short if length <= SHORT_LEAVES * self.short else self.leaf):
            leaves *= 2
        return leaves


def is_transposed(heads: int, one_query: bool) -> bool:
    """Returns whether the tree's kernel for few heads takes a call: by heads and the form of the call, by no length."""
    return one_query and heads <= MOST_HEADS_TRANSPOSED


def tree_of(heads: int, one_query: bool) -> Tree:
    """The tree that no batch and no number of queries changes, and with several queries no length.

    Few rows leave a partial result small enough for short leaves, which small batches need to fill a card, and for
    folding a group in registers; where they are many, 64 KB of a sum are read and written once for each leaf.
    """
    if is_transposed(heads, one_query):
        return Tree(640, 8, short=512)
    if one_query:  # ADR 18 has what 1,280 costs fewer heads
        return Tree(1280 if heads > 64 else 1152, 8, short=1024)
    return Tree(1024, 8)
