"""One place where an op can run.

Knows no op and no test.
"""

from typing import NamedTuple

import torch

from kernels.backend import Backend


class Target(NamedTuple):
    """The device that holds the tensors and the implementation that is asked for."""

    device: str
    backend: Backend

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """What attention can compute with here: tensor cores have no fp32."""
        half = (torch.bfloat16, torch.float16)
        return half if self.device == "cuda" else (*half, torch.float32)

    @property
    def is_exact(self) -> bool:
        """Whether bits are promised to survive every cut; the references promise fp32 rounding."""
        return self.backend is Backend.TRITON


REFERENCE = Target("cpu", Backend.REFERENCE)
INTERPRETER = Target("cpu", Backend.TRITON)
CUDA = Target("cuda", Backend.TRITON)
