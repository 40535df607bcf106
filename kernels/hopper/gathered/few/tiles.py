"""Shared by the launches for few rows: which tile a program has, and where what they hand on lies.

Scores, weights and what goes with them lie by token, tile of heads, tile of keys.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def tile_slot(token, head_tile, key_tile, key_tiles, HEADS: gl.constexpr):
    """Returns the number of a tile in what the launches hand on."""
    HEAD_TILES: gl.constexpr = (HEADS + 63) // 64
    return (token * HEAD_TILES + head_tile).to(gl.int64) * key_tiles + key_tile


@gluon.jit
def heads_and_keys(HEADS: gl.constexpr):
    """(tile of heads, tile of keys) of a program; programs of the same keys are neighbours."""
    HEAD_TILES: gl.constexpr = (HEADS + 63) // 64
    return gl.program_id(0) % HEAD_TILES, gl.program_id(0) // HEAD_TILES
