"""Which implementation of an op runs: a kernel on a CUDA device, the torch reference on a CPU.

Knows no op. Triton is imported only when it is chosen, so a machine without it can serve with the references.
"""

import os
from enum import Enum

import torch

from kernels.errors import KernelArgumentError


class Backend(Enum):
    """AUTO decides by the device and the case; the others are asked for by tests and benchmarks.

    GLUON is the kernel for Hopper of an op that has one, TRITON the plain kernel that takes every case.
    """

    AUTO = "auto"
    GLUON = "gluon"
    TRITON = "triton"
    REFERENCE = "reference"


def uses_triton(backend: Backend, tensor: torch.Tensor) -> bool:
    """Whether an op on this tensor launches its Triton kernel; ops that know GLUON look for it before they ask here."""
    if backend is Backend.GLUON:
        raise KernelArgumentError("backend GLUON: this op has no such kernel to be asked for; AUTO takes what fits")
    if backend is not Backend.TRITON:
        return backend is Backend.AUTO and tensor.is_cuda
    if not tensor.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise KernelArgumentError(
            f"backend TRITON needs a CUDA tensor or TRITON_INTERPRET=1; the tensor is on {tensor.device}"
        )
    return True
