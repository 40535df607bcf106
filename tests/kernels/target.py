"""One place where an op can run."""

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


REFERENCE = Target("cpu", Backend.REFERENCE)
INTERPRETER = Target("cpu", Backend.TRITON)
CUDA = Target("cuda", Backend.TRITON)
# What a GPU takes by itself: the Gluon kernel of an op that has one, where it is a Hopper.
HOPPER = Target("cuda", Backend.AUTO)
