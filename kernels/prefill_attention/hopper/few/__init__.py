"""prefill_attention on Hopper where a launch has few rows: programs share keys, with the bits of `attend_tiles`.

A tile here is 64 rows, half of one of the plan's. In rounds of some key tiles each, two kinds of programs work at once:

    scorers    score round 0 | meet | weigh round 0 | score round 1 | meet | weigh round 1 | ...
    adders                                          | add round 0                          | add round 1 | ...

If the tiles of scores are no more than the programs, every program first scores one, then the adders add: one round.

score    128 keys for 64 rows: each row's maximum is written
weigh    all earlier maxima are known: the scores become weights, their sums and the factors of what came before
add      64 columns of 16 rows, key tile after key tile: as `attend_tiles` does, in its order

Rows are independent, and so are a row's columns once its weights are known: each step is that of the kernel for many
rows, with the same numbers, so bits do not depend on who computes a tile. Windows, fp8 pages and other head dims stay
with that kernel, and so do launches of more rows or sequences: tiles for more programs leave less to share.
"""

from kernels.attention import AttentionSpec

__all__ = ["HEAD_DIMS", "KEY_TILE", "MOST_ROW_TILES", "shares", "takes"]

HEAD_DIMS = (64, 128)
# Keys of a tile, as `attend_tiles` has for these heads.
KEY_TILE = 128
# Tiles of 64 rows up to which keys are shared. Behind 4,096 keys 8, 16 and 32 take 35, 50 and 77 us on an H200; any
# number takes 46 if none are. Behind 16,384 keys 16 take 133 us, and 138 if none are shared.
MOST_ROW_TILES = 16


def shares(group: int, dim: int) -> bool:
    """Returns whether keys may be shared for heads of this size, `group` query heads to a kv head."""
    return dim in HEAD_DIMS and group <= 64 and group & (group - 1) == 0


def takes(spec: AttentionSpec, num_tokens: int, num_seqs: int) -> bool:
    """Returns whether a launch of that many tokens and sequences shares keys: both are fixed when it is captured."""
    if spec.window or spec.scales is not None or not shares(spec.group, spec.shape.dim):
        return False
    half_queries = 64 // spec.group
    # Each sequence may end in a tile that it does not fill.
    most_tiles = num_seqs + max(num_tokens - num_seqs, 0) // (2 * half_queries)
    halves = 2 if num_tokens > half_queries else 1
    return most_tiles * halves * spec.shape.heads <= MOST_ROW_TILES
