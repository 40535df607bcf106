"""Programmatic dependent launch: a kernel starts while the one before it on the stream still runs.

Knows no op. A kernel that takes part says first of all that its successor may start, and touches what others write only
after it has waited for its predecessor; its launcher passes `launch_options`. Kernels that take no part may stand
between: they start and end as ever.
"""

import torch

# From Hopper on.
LEAST_CAPABILITY = 9
# As many as one device runs at once. In a longer grid every program pays for its wait while the successor, which cannot
# start before the last of them has, gains nothing: appending 65,536 tokens took 476 us so and 406 us without.
MAX_PROGRAMS = 4096


def overlaps(tensor: torch.Tensor, programs: int) -> bool:
    """Whether a grid of so many programs on this tensor's device should take part."""
    if programs > MAX_PROGRAMS or not tensor.is_cuda:
        return False
    return torch.cuda.get_device_capability(tensor.device)[0] >= LEAST_CAPABILITY


def launch_options(overlap: bool) -> dict[str, bool]:
    """What a Triton launch takes; the interpreter knows no such option."""
    return {"launch_pdl": True} if overlap else {}
