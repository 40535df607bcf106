"""Programmatic dependent launch: a kernel starts while the one before it on the stream still runs.

Knows no op. A kernel that takes part says first of all that its successor may start, and touches what others write only
after it has waited for its predecessor; its launcher passes `launch_options`. Kernels that take no part may stand
between: they start and end as ever.
"""

import torch

# From Hopper on.
LEAST_CAPABILITY = 9


def overlaps(tensor: torch.Tensor) -> bool:
    """Whether kernels on this tensor's device can take part."""
    return tensor.is_cuda and torch.cuda.get_device_capability(tensor.device)[0] >= LEAST_CAPABILITY


def launch_options(overlap: bool) -> dict[str, bool]:
    """What a Triton launch takes; the interpreter knows no such option."""
    return {"launch_pdl": True} if overlap else {}
