"""Constants of the softmax in the attention kernels, which count in base 2; `triton` has them for jit functions.

A softmax state is the largest score of some keys, the sum of 2^(score - that maximum), and the values weighted so.
"""

__all__ = ["LN_2", "LOG2_E", "MASKED", "NO_KEYS"]

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
# The maximum of a state without keys, and the score of a masked key. 2^(MASKED - NO_KEYS) is 0 in fp32, so a masked key
# weighs nothing even in a row that has seen no key yet; and unlike infinities their differences are never NaN.
NO_KEYS = -1.0e20
MASKED = -1.0e30
