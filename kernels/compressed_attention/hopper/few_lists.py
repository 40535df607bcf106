"""What a launch of few rows reads of a token's list: what it can before it knows how many keys there are."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.compressed_attention.hopper.kernel import count_in_list, rows_at


@gluon.jit
def read_list(keys, token, first, row):
    """The token, its sequence, how many keys it sees, and which entries keys first + row are where its window is full.

    With the choice read behind the number of keys, a launch would wait for memory once more.
    """
    chosen = row
    if keys[2][6]:
        entry = gl.minimum(gl.maximum(first + row - keys[1][4], 0), keys[2][6] - 1)
        chosen = gl.load(keys[2][5] + token.to(gl.int64) * keys[2][6] + entry)
    return token.to(gl.int64), gl.load(keys[0][0] + token), gl.load(keys[0][1] + token), chosen


@gluon.jit
def count_in(keys, read):
    """Returns how many keys the list has."""
    return count_in_list(keys, read[2])


@gluon.jit
def rows_in(keys, read, first, stop, row):
    """Returns the rows of the pools that keys first + row lie in; past the end it is the list's first one's."""
    token, sequence, num_keys, chosen = read
    in_window = gl.minimum(num_keys, keys[1][4])
    key = gl.where(first + row < stop, first + row, 0)
    entry = gl.maximum(key - in_window, 0)
    if keys[2][6]:
        if in_window < keys[1][4]:
            chosen = gl.load(keys[2][5] + token * keys[2][6] + entry)
        entry = gl.where(key >= in_window, chosen, 0)
    return rows_at(keys, (token, sequence.to(gl.int64), num_keys - in_window, in_window), key, entry)
