"""Where the columns of a part lie: in the order of product_layout.py; ascending where heads are few."""

import triton
import triton.language as tl


@triton.jit
def column_at(place, FEW: tl.constexpr):
    """Returns which of 256 columns lies at a place of a part's row; FEW: of a kernel for few heads."""
    column = place
    if not FEW:
        column = place // 32 * 32 + place // 2 % 4 * 8 + place // 8 % 4 * 2 + place % 2
    return column
