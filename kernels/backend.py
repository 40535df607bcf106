"""Which implementation of an op runs: a kernel on a CUDA device, the torch reference on a CPU.

Triton is imported only when it is chosen, so a machine without it can serve with the references.
"""

import functools
import os
from collections.abc import Callable
from enum import Enum

import torch

from kernels.errors import KernelArgumentError


class Backend(Enum):
    """AUTO decides by the device and the case; the others are asked for by tests and benchmarks.

    GLUON is the kernel for Hopper of an op that has one, TRITON the plain kernel that takes every case. On a CPU AUTO
    takes an op's `cpu` module where it has one for the case, else the reference.
    """

    AUTO = "auto"
    GLUON = "gluon"
    TRITON = "triton"
    REFERENCE = "reference"


def uses_triton(backend: Backend, tensor: torch.Tensor) -> bool:
    """Returns whether an op on this tensor launches its Triton kernel; an op with a Gluon kernel tries that first."""
    if backend is Backend.GLUON:
        raise KernelArgumentError("backend GLUON: this op has no such kernel to be asked for; AUTO takes what fits")
    if backend is not Backend.TRITON:
        return backend is Backend.AUTO and tensor.is_cuda
    if not tensor.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise KernelArgumentError(
            f"backend TRITON needs a CUDA tensor or TRITON_INTERPRET=1; the tensor is on {tensor.device}"
        )
    return True


def choose_backend(backend: Backend, tensor: torch.Tensor, reason_against: Callable[[], str | None]) -> Backend:
    """Returns the implementation that an op with a Gluon kernel launches: GLUON, TRITON or REFERENCE.

    `reason_against` says why the Gluon kernel cannot take the case (None: it can); a refused GLUON raises with it.
    """
    if backend in (Backend.AUTO, Backend.GLUON):
        reason = reason_against()
        if reason is None:
            return Backend.GLUON
        if backend is Backend.GLUON:
            raise KernelArgumentError(f"backend GLUON: {reason}")
    return Backend.TRITON if uses_triton(backend, tensor) else Backend.REFERENCE


def is_hopper(device: torch.device) -> bool:
    """Returns whether the Gluon kernels can run there: on a CUDA device of compute capability 9.0."""
    return device.type == "cuda" and _capability(device) == (9, 0)


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
