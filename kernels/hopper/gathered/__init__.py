"""Attention over lists of gathered keys, a row of which is its value too, for Hopper: what its ops share.

An op's kernel calls `attention.attend_lists` with its keys, a tuple of pointers, strides and constants, and with four
jit functions that alone know what is in it:

    count_of(keys, token)                how many keys the list of a token has
    list_of(keys, token)                 what is the same for all keys of the list
    rows_of(keys, list, first, stop, i)  where keys first + i of the list are, int32; past stop it is the last one's row
    addresses_of(keys, rows)             pointers to these rows

A constant that a branch depends on is read from `keys` by its index: assigned to a name, it would become a tensor.

A list is read in tiles of 64 keys. Each piece of PIECE keys has a softmax of its own, and pieces are folded in
ascending order: by one program, or, where SPLITS, each is written by its own program and folded behind.

A row's weights are 2^(score - a whole number), which may be any above its scores (`weights`): all launches have the
same bits, whichever they take.
"""
