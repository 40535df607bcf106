"""Where the columns of a part lie: as threads have them after products, see parts.py and few_parts.py."""

import triton
import triton.language as tl


@triton.jit
def column_at(place, FEW: tl.constexpr):
    """Returns which of 256 columns lies at a place of a part's row; FEW: of a kernel whose products are transposed."""
    if FEW:
        column = place // 2 % 4 * 64 + place // 64 * 16 + place % 2 * 8 + place // 8 % 8
    else:
        column = place // 32 * 32 + place // 2 % 4 * 8 + place // 8 % 4 * 2 + place % 2
    return column
