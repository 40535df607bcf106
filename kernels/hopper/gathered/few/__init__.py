"""Attention over gathered keys where a launch has few rows: launches that overlap, with the bits of `attend_lists`.

score_tile         a program scores a tile of 64 keys, or half of one, for 64 heads
weigh_tile         a program turns a tile's scores into weights: the maxima of all earlier tiles are known
attend_columns     a program walks a piece's tiles in order, for some heads and 64 of the value columns
weigh_and_attend   in place of both, for lists of few keys

Grids are (programs of a token and a piece, tokens, pieces). An op passes its keys and functions as to `attend_lists`,
but reads a list in two steps, so that nothing waits for how many keys there are:

    read_list(keys, token, first, i)     what it likes of keys first + i, and how many the token sees
    count_in(keys, read)                 how many keys the list has
    rows_in(keys, read, first, stop, i)  where keys first + i of the list are, int32; past stop it is any key's row

What they hand on lies in `scratch`, a tuple of pointers: scores, their maxima (peaks), weights, decays, sums of
weights, maxima so far (tops), a piece's sums (acc) and sums of weights (row_sum), and counters of pieces that are done.
"""
