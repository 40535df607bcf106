"""Sizes of what is cut by load: the rows of a tile, and how its parts are folded by programs together."""

__all__ = ["LONGER", "MANY_PARTS", "MANY_ROWS", "MOST_MERGED", "PIECES", "PIECE_BLOCK", "ROW_BLOCK", "tile_rows_of"]

# A task of the fold is this number of rows.
ROW_BLOCK = 8
# Where heads are few, from this number of parts on it is fewer rows, whose parts are shared out among threads, and the
# tile is listed as several pieces. Many heads' kernel takes longer with that code than it gains.
MANY_PARTS, PIECES = 16, 4
PIECE_BLOCK = ROW_BLOCK // PIECES
# Where heads are few and no tile has more parts than this, the program with the first one merges the others. It has a
# tile of latents more, to end last: 64 x 8,192 with 16 heads take 143.5 us, without 144.1, with two 144.7 (H200).
MOST_MERGED, LONGER = 2, 1
# Up to this number of heads a query's rows are the narrow side of products 16 or 32 wide; else tiles have MANY_ROWS.
MOST_HEADS_TRANSPOSED_BY_LOAD, MANY_ROWS = 32, 64


def tile_rows_of(heads: int, one_query: bool) -> int:
    """Returns the rows of a tile: below MANY_ROWS the kernel of few heads takes it."""
    if not one_query or heads > MOST_HEADS_TRANSPOSED_BY_LOAD:
        return MANY_ROWS
    return 16 if heads <= 16 else 32
