"""Sorts, and reductions and scans by a kernel's own function, in few steps of Triton's interpreter.

Its own reductions and scans go element by element, each in a tensor of its own. Here the elements of an axis are taken
in the same order, but those of all other axes at once: the numbers are the same.
"""

from typing import Any

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as interpreter


def reduce_slices(self: Any, values: Any) -> list[Any]:
    """Stands for ReduceOps.generic_reduce: `values` is a tuple of tensors of one shape."""
    values, axis = self.unravel(values, self.axis)
    total = _slices(self, values, axis, 0)
    for at in range(1, values[0].handle.data.shape[axis]):
        total = _combined(self, values, total, _slices(self, values, axis, at))
    arrays = [tensor.handle.data.reshape(_without(value, axis)) for tensor, value in zip(total, values, strict=True)]
    if self.keep_dims:
        arrays = [np.expand_dims(array, axis) for array in arrays]
    return [
        self.to_tensor(array if array.shape else array.item(), value.dtype)
        for array, value in zip(arrays, values, strict=True)
    ]


def scan_slices(self: Any, values: Any) -> list[Any]:
    """Stands for ScanOps.generic_scan."""
    axis = self.axis
    found = [np.empty_like(value.handle.data) for value in values]
    total: tuple[Any, ...] = ()
    for at in range(values[0].handle.data.shape[axis]):
        here = _slices(self, values, axis, at)
        total = _combined(self, values, total, here) if total else here
        for array, tensor in zip(found, total, strict=True):
            place = [slice(None)] * array.ndim
            place[axis] = at
            array[tuple(place)] = tensor.handle.data.reshape(array[tuple(place)].shape)
    return [self.to_tensor(array, value.dtype) for array, value in zip(found, values, strict=True)]


def sort_rows(values: Any, dim: Any = None, descending: Any = False) -> Any:
    """Stands for tl.sort, which sorts along the last axis."""
    last = len(values.shape) - 1
    assert getattr(dim, "value", dim) in (None, last), "only the last axis can be sorted"
    ordered = np.sort(values.handle.data, axis=last)
    ordered = np.flip(ordered, last) if getattr(descending, "value", descending) else ordered
    return tl.tensor(interpreter.TensorHandle(ordered, values.dtype), values.type)


def _without(value: Any, axis: int) -> tuple[int, ...]:
    shape = value.handle.data.shape
    return tuple(shape[:axis] + shape[axis + 1 :])


def _slices(self: Any, values: Any, axis: int, at: int) -> tuple[Any, ...]:
    return tuple(self.to_tensor(np.take(value.handle.data, at, axis), value.dtype) for value in values)


def _combined(self: Any, values: Any, left: tuple[Any, ...], right: tuple[Any, ...]) -> tuple[Any, ...]:
    got = self.combine_fn.fn(*left, *right)
    got = got if isinstance(got, tuple) else (got,)
    return tuple(
        self.to_tensor(tensor.handle.data.reshape(_shape(part)), value.dtype)
        for tensor, value, part in zip(got, values, left, strict=True)
    )


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(tensor.type.shape) if tensor.type.is_block() else ()
