"""Attention over gathered keys where a launch has few rows: three launches that overlap, the bits of `attend_lists`.

score_tile      a program scores a tile of 64 keys for 64 heads
weigh_tile      a program turns a tile's scores into weights: the maxima of all earlier tiles are known
attend_columns  a program walks a piece's tiles in order, for some heads and 64 of the value columns

The op's functions are those of `attend_lists`, but for `list_of(keys, token, first, i)`: it may read what it likes of
keys first + i before it is known how many there are.

What they hand on lies in `scratch`, a tuple of pointers: scores, their maxima (peaks), weights, decays, sums of
weights, maxima so far (tops), a piece's sums (acc) and sums of weights (row_sum), and counters of pieces that are done.
"""
