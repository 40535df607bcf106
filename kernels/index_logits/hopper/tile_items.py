"""Items of index_logits' tiles: a block of keys and a tile of rows each, in an order that gives every program as much.

Of a prompt the last rows see all blocks and the first ones few. A tile and its mirror image go together:

    tile     blocks that it sees     pair
    0        x . . . . .             x . . . . . x x x x x x
    1        x x . . . .             x x . . . . x x x x x .
    ...
    5        x x x x x x
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def seen_blocks(tile, blocks, before, ROWS: gl.constexpr, BLOCK: gl.constexpr):
    """Blocks that a prompt's tile of rows sees, where there are `before` before its first row's; all if negative."""
    return gl.where(before < 0, blocks, before + tile * ROWS // BLOCK + 1)


@gluon.jit
def number_of_items(blocks, tiles):
    """Numbers that item_of takes: more than there are items."""
    return (tiles + 1) // 2 * (2 * blocks + 1)


@gluon.jit
def item_of(number, blocks, tiles, ROWS: gl.constexpr, BLOCK: gl.constexpr):
    """(block, tile) of an item; the block is -1 where a number has none. Each block and tile have one number.

    As if the rows were one prompt's, whose last row sees all keys: then a pair sees `both` blocks or one less. These
    come first, pair by pair, and after those of all pairs what they do not see.
    """
    before = blocks - 1 - (tiles - 1) * ROWS // BLOCK
    both = gl.where(before < 0, 2 * blocks, 2 * before + (tiles - 1) * ROWS // BLOCK + 2)
    seen = (tiles + 1) // 2 * both
    is_seen = number < seen
    width = gl.where(is_seen, both, 2 * blocks - both + 1)
    rest = gl.where(is_seen, number, number - seen)
    low = rest // width
    high = tiles - 1 - low
    place = rest % width
    of_high = seen_blocks(high, blocks, before, ROWS, BLOCK)
    of_low = seen_blocks(low, blocks, before, ROWS, BLOCK)
    count_high = gl.where(is_seen, of_high, blocks - of_high)
    is_high = place < count_high
    of_rest = gl.where(is_seen, 0, of_low) + place - count_high
    block = gl.where(is_high, gl.where(is_seen, 0, of_high) + place, of_rest)
    # The tile in the middle is its own mirror image.
    exists = is_high | ((low < high) & (of_rest < gl.where(is_seen, of_low, blocks)))
    return gl.where(exists, block, -1), gl.where(is_high, high, low)


@gluon.jit
def run_from(row, tile_row, sequences):
    """(sequence, which of a tile's rows are of it, end) of the run of rows of one sequence that begins at `row`."""
    sequence = gl.max(gl.where(tile_row == row, sequences, -2), 0)
    of_run = (sequences == sequence) & (tile_row >= row)
    return sequence, of_run, row + gl.sum(of_run.to(gl.int32), 0)


@gluon.jit
def rows_behind(limit, of_run, seen, least_keys):
    """Rows of a run that see more keys than `limit`: its last ones."""
    return gl.sum((of_run & (seen > gl.maximum(limit, least_keys))).to(gl.int32), 0)
