"""Slots of recurrent states in Triton; jit functions that the ops' kernels call."""

import triton
import triton.language as tl


@triton.jit
def slots_of_row(row, working_ptr, restore_ptr, fresh_ptr):
    """Returns the slot that a row begins from and its working slot, both 64 bits wide.

    0 or less: it begins from zeros; the row is padding.
    """
    working = tl.load(working_ptr + row).to(tl.int64)
    restore = tl.load(restore_ptr + row).to(tl.int64)
    source = tl.where(restore > 0, restore, working)
    return tl.where(tl.load(fresh_ptr + row) != 0, 0, source), working
