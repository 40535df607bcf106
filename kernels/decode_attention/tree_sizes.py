"""The sizes of decode_attention's summation tree for Hopper. Every result's bits depend on all three.

splits_triton.py divides work along the tree, hopper/tree.py and hopper/merge.py sum along it. The plain Triton kernel
merges splits in their order instead, SPLIT keys in each (triton.py).
"""

__all__ = ["LEAF", "LEAVES_PER_GROUP", "TILE"]

# Keys of a tile and of a leaf.
TILE = 64
LEAF = 512
LEAVES_PER_GROUP = 4
