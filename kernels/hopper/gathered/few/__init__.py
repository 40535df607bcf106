"""Attention over gathered keys where a launch has few rows: launches that overlap, with the bits of `attend_lists`.

weigh_keys       a program makes the weights of 64 keys, or of 32, for 64 heads, by the largest of their own scores
attend_columns   a program walks a piece's tiles in order, for some heads and 64 of the value columns; before that it
                 makes weights by the piece's largest score of them: a product with a power of two

Grids are (programs of a token and a piece, tokens, pieces). An op passes its keys and functions as to `attend_lists`,
but reads a list in two steps, so that nothing waits for how many keys there are:

    read_list(keys, token, first, i)     what it likes of keys first + i, and how many the token sees
    count_in(keys, read)                 how many keys the list has
    rows_in(keys, read, first, stop, i)  where keys first + i of the list are, int32; past stop it is any key's row

What they hand on lies in `scratch`, a tuple of pointers: weights, what was taken from their scores (tops), sums of
weights, a piece's sums of values (acc) and of weights (row_sum), and counters of pieces that are done.
"""
