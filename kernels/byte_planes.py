"""Pools of pages or states as raw bytes, for the ops that copy whole ones."""

import torch

from kernels._checks import check_contiguous
from kernels.errors import KernelArgumentError

__all__ = ["byte_planes", "widest_word"]

WORD_TYPES = (torch.int64, torch.int32, torch.int16, torch.uint8)


def byte_planes(pool: torch.Tensor, name: str, axis: int, axis_name: str) -> torch.Tensor:
    """Returns a contiguous pool as bytes [num_planes, pool.shape[axis], bytes], sharing its memory.

    The axes before `axis` are planes: layers, K and V.
    """
    check_contiguous(name, pool)
    if not 0 <= axis < pool.dim() - 1:
        raise KernelArgumentError(f"{axis_name}: {name} of shape {list(pool.shape)} cannot be counted by axis {axis}")
    planes, width = pool.shape[:axis].numel(), pool.shape[axis + 1 :].numel() * pool.element_size()
    return pool.view(torch.uint8).view(planes, pool.shape[axis], width)


def widest_word(planes: torch.Tensor, *others: torch.Tensor) -> torch.dtype:
    """Returns the widest integer type that planes of bytes, and other bytes that go to or from them, can be seen as."""
    places = [int(planes.shape[2])]
    for tensor in (planes, *others):
        places += [tensor.data_ptr(), int(tensor.storage_offset())]
    return next(word for word in WORD_TYPES if all(place % word.itemsize == 0 for place in places))
