"""Shared by the launches for few rows: which tile a program has, where its results lie, and positions of its latents.

Scores, weights and what goes with them lie by token, tile of heads, tile of latents.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def tile_of(program, K: gl.constexpr, HEADS: gl.constexpr):
    """(token, tile of heads, tile of latents) of a program; programs of the same latents are neighbours."""
    HEAD_TILES: gl.constexpr = (HEADS + 63) // 64
    KEY_TILES: gl.constexpr = (K + 63) // 64
    return program // (HEAD_TILES * KEY_TILES), program % HEAD_TILES, program // HEAD_TILES % KEY_TILES


@gluon.jit
def tile_slot(token, head_tile, key_tile, K: gl.constexpr, HEADS: gl.constexpr):
    """Returns the number of a tile in the buffers that the launches share."""
    HEAD_TILES: gl.constexpr = (HEADS + 63) // 64
    KEY_TILES: gl.constexpr = (K + 63) // 64
    return (token * HEAD_TILES + head_tile).to(gl.int64) * KEY_TILES + key_tile


@gluon.jit
def positions_from(chosen_ptr, at, first, stop, K: gl.constexpr):
    """Returns the chosen positions `at`; from `stop` on it is that of `first`, whose latent is read and masked.

    Both are read before `stop` is known: one wait for memory less.
    """
    position = gl.load(chosen_ptr + gl.minimum(at, K - 1))
    first_position = gl.load(chosen_ptr + gl.minimum(first, K - 1))
    return gl.where(at < stop, position, first_position)
