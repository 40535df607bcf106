"""A launch of a Triton kernel that begins while the one before it ends (programmatic dependent launch), on Hopper.

What a kernel does before `allow_next_launch_and_wait` must not depend on earlier launches: it may read constants, such
as weights, and write nothing that they read. Gluon kernels have `hopper.launches`.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.backend import is_hopper


@triton.jit
def allow_next_launch_and_wait(OVERLAPS: tl.constexpr):
    """Lets the next launch begin once all programs of this one have come here, then waits until all earlier launches
    have ended and what they wrote can be read. Does nothing unless OVERLAPS."""
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()


def overlap_options(device: torch.device, *, when: bool = True) -> dict[str, bool]:
    """Returns the options of a launch that overlaps its neighbours on Hopper, or nowhere unless `when`."""
    overlaps = when and is_hopper(device)
    return {"OVERLAPS": overlaps, "launch_pdl": overlaps}
