"""The two sides of a dependent launch, in Triton.

Knows nothing of what the kernels compute.
"""

import triton
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def take_turn():
    """Lets the next kernel start, then waits until the one before has ended and its writes can be seen."""
    gdc_launch_dependents()
    gdc_wait()
