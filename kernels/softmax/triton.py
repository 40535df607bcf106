"""The constants of `kernels.softmax` as jit functions need them: known when they are compiled."""

import triton.language as tl

from kernels import softmax

LOG2_E = tl.constexpr(softmax.LOG2_E)
LN_2 = tl.constexpr(softmax.LN_2)
NO_KEYS = tl.constexpr(softmax.NO_KEYS)
MASKED = tl.constexpr(softmax.MASKED)
