"""Operations of Triton's interpreter, without its work around them, on the operands that kernels have most.

For each operation Triton checks types, converts and broadcasts the operands and makes types anew: ten times what numpy
takes for a scalar or a small block. Operands of one plain type need none of that, nor does a number beside a tensor,
which takes the tensor's type: numpy broadcasts as Triton does. All others go Triton's way, and so does a sum that
overflows, which is told there. test_interpreter.py holds each against Triton's way.
"""

from collections.abc import Callable
from functools import cache
from math import copysign, prod
from operator import methodcaller
from typing import Any

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as interpreter

from tests.kernels.interpreter_formats import round_to_bf16, widen_bf16

Operation = Callable[..., Any]

INTEGERS = ("int32", "int64")
NUMBERS: dict[str, tuple[type, ...]] = {"int32": (int,), "int64": (int,), "fp32": (int, float)}
NUMPY_TYPES = {
    "int1": np.dtype(bool),
    "int32": np.dtype(np.int32),
    "int64": np.dtype(np.int64),
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(np.uint16),
    "fp32": np.dtype(np.float32),
}
CONVERSIONS: dict[tuple[str, str], Operation] = {
    ("bf16", "fp32"): widen_bf16,
    ("fp32", "bf16"): round_to_bf16,
    **{
        pair: methodcaller("astype", NUMPY_TYPES[pair[1]])
        for pair in (
            ("int1", "int32"),
            ("int1", "fp32"),
            ("int32", "int64"),
            ("int64", "int32"),
            ("int32", "fp32"),
            ("fp32", "int32"),
            ("fp16", "fp32"),
        )
    },
}
LEAST, MOST = -(1 << 31), (1 << 31) - 1
# Normal numbers of fp32.
SMALLEST, LARGEST, INFINITY = 2.0**-126, (2 - 2.0**-23) * 2.0**127, float("inf")

# How long a cache should keep what is read: nothing to the interpreter.
ADVICE = {"cache_modifier", "eviction_policy"}

# What tensors of a type and shape have in common: their type, its scalar, shape and size.
_kinds: dict[tuple[str, Any], tuple[Any, Any, Any, Any]] = {}


def quick_ways() -> dict[Any, Callable[[Operation], Operation]]:
    """Returns what is put before an operation, by Triton's own function, which a launch replaces."""
    numbers = ("int32", "int64", "fp32")
    tensor = tl.tensor
    return {
        tensor.__add__: _sums(_arithmetic(np.add, numbers, told=True)),
        tensor.__radd__: _arithmetic(np.add, numbers, told=True),
        tensor.__sub__: _arithmetic(np.subtract, numbers, told=True),
        tensor.__rsub__: _arithmetic(_swapped(np.subtract), numbers, told=True),
        tensor.__mul__: _arithmetic(np.multiply, numbers, told=True),
        tensor.__rmul__: _arithmetic(np.multiply, numbers, told=True),
        tensor.__truediv__: _arithmetic(np.divide, ("fp32",)),
        tensor.__floordiv__: _arithmetic(_quotient, INTEGERS),
        tensor.__mod__: _arithmetic(np.fmod, INTEGERS),
        tensor.__lt__: _arithmetic(np.less, numbers, compares=True),
        tensor.__le__: _arithmetic(np.less_equal, numbers, compares=True),
        tensor.__gt__: _arithmetic(np.greater, numbers, compares=True),
        tensor.__ge__: _arithmetic(np.greater_equal, numbers, compares=True),
        tensor.__eq__: _arithmetic(np.equal, numbers, compares=True),
        tensor.__ne__: _arithmetic(np.not_equal, numbers, compares=True),
        tensor.__and__: _arithmetic(np.bitwise_and, ("int1", *INTEGERS)),
        tensor.__or__: _arithmetic(np.bitwise_or, ("int1", *INTEGERS)),
        tensor.__xor__: _arithmetic(np.bitwise_xor, ("int1", *INTEGERS)),
        tl.core.minimum: _arithmetic(np.minimum, numbers),
        tl.core.maximum: _arithmetic(np.maximum, numbers),
        tl.core.where: _choice,
        tl.core.load: _load,
        tensor.to: _conversion,
        tensor.__getitem__: _expansion,
    }


def as_tensor(slow: Operation) -> Operation:
    """Returns what replaces `to_tensor`, which Triton calls for each value that a kernel assigns to a variable."""

    def converted(self: Any, value: Any, *more: Any, **named: Any) -> Any:
        if type(value) is tl.tensor:
            return value
        if type(value) is int and LEAST <= value <= MOST:
            return make(np.array([value], np.int32), tl.int32, False)
        return slow(self, value, *more, **named)

    return converted


def make(data: Any, scalar: Any, is_block: bool) -> Any:
    """Returns the tensor of numpy's `data`."""
    key = scalar.name, data.shape if is_block else None
    if key not in _kinds:
        kind = tl.block_type(scalar, list(data.shape)) if is_block else scalar
        _kinds[key] = kind, scalar, *constant_shape(data.shape if is_block else ())
    handle = object.__new__(interpreter.TensorHandle)
    handle.data, handle.dtype, handle.attr = data, scalar, {}
    tensor = object.__new__(tl.tensor)
    tensor.handle = handle
    tensor.type, tensor.dtype, tensor.shape, tensor.numel = _kinds[key]
    return tensor


@cache
def constant_shape(sizes: tuple[int, ...]) -> tuple[Any, Any]:
    return tl.core.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(prod(sizes))


def _swapped(operation: Operation) -> Operation:
    return lambda a, b, **more: operation(b, a, **more)


def _quotient(a: Any, b: Any) -> Any:
    """Returns a / b, rounded towards zero as Triton does."""
    return (a - np.fmod(a, b)) // b


def _arithmetic(
    operation: Operation, names: tuple[str, ...], told: bool = False, compares: bool = False
) -> Callable[[Operation], Operation]:
    """`names` are the types that it knows; `told` says that a result beyond int32 is an error."""

    def before(slow: Operation) -> Operation:
        def computed(lhs: Any, rhs: Any, **more: Any) -> Any:
            other = rhs.value if type(rhs) is tl.constexpr else rhs
            if more or type(lhs) is not tl.tensor:
                return slow(lhs, rhs, **more)
            scalar, is_block = lhs.dtype, lhs.type.is_block()
            if type(other) is tl.tensor:
                if scalar.name != other.dtype.name:
                    if scalar.name not in INTEGERS or other.dtype.name not in INTEGERS:
                        return slow(lhs, rhs)
                    scalar = tl.int64
                is_block, other = is_block or other.type.is_block(), other.handle.data
            elif not _takes(scalar.name, other):
                return slow(lhs, rhs)
            if scalar.name not in names:
                return slow(lhs, rhs)
            if told and scalar.name == "int32":
                exact = operation(lhs.handle.data, other, dtype=np.int64)
                data = exact.astype(np.int32)
                if not (LEAST <= exact.item() <= MOST if exact.size == 1 else (exact == data).all()):
                    return slow(lhs, rhs)
            else:
                data = operation(lhs.handle.data, other)
            return make(data, tl.int1 if compares else scalar, is_block)

        return computed

    return before


def _takes(name: str, number: Any) -> bool:
    """Says whether a tensor of this type and a number have the tensor's type together, and the number its value."""
    if type(number) not in NUMBERS.get(name, ()):
        return False
    if type(number) is int:
        return LEAST <= number <= MOST
    return SMALLEST <= abs(number) <= LARGEST or number in (INFINITY, -INFINITY) or _is_zero(number)


def _is_zero(number: float) -> bool:
    """A negative zero becomes a positive one in Triton."""
    return number == 0 and copysign(1, number) > 0


def _sums(plain: Callable[[Operation], Operation]) -> Callable[[Operation], Operation]:
    """Pointers and offsets are added too."""

    def before(slow: Operation) -> Operation:
        add = plain(slow)

        def added(lhs: Any, rhs: Any, **more: Any) -> Any:
            pointer = lhs.dtype
            if type(pointer) is not tl.pointer_type or pointer.address_space != 1:
                return add(lhs, rhs, **more)
            if more or type(rhs) is not tl.tensor or rhs.dtype.name not in INTEGERS:
                return slow(lhs, rhs, **more)
            width = max(1, pointer.element_ty.primitive_bitwidth // 8)
            data = lhs.handle.data + width * rhs.handle.data.astype(np.uint64)
            return make(data, pointer, lhs.type.is_block() or rhs.type.is_block())

        return added

    return before


def _choice(slow: Operation) -> Operation:
    def chosen(condition: Any, x: Any, y: Any, **more: Any) -> Any:
        a = x.value if type(x) is tl.constexpr else x
        b = y.value if type(y) is tl.constexpr else y
        scalar = a.dtype if type(a) is tl.tensor else b.dtype if type(b) is tl.tensor else None
        if more or scalar is None or type(condition) is not tl.tensor or condition.dtype.name != "int1":
            return slow(condition, x, y, **more)
        is_block, sides = condition.type.is_block(), []
        for side in (a, b):
            if type(side) is tl.tensor and side.dtype.name == scalar.name:
                is_block = is_block or side.type.is_block()
                sides.append(side.handle.data)
            elif _takes(scalar.name, side):
                sides.append(NUMPY_TYPES[scalar.name].type(side))
            else:
                return slow(condition, x, y)
        return make(np.where(condition.handle.data, *sides), scalar, is_block)

    return chosen


def _conversion(slow: Operation) -> Operation:
    def converted(tensor: Any, dtype: Any, *more: Any, **named: Any) -> Any:
        wanted = dtype.value if type(dtype) is tl.constexpr else dtype
        if more or named or (tensor.dtype.name, wanted.name) not in CONVERSIONS:
            return slow(tensor, dtype, *more, **named)
        return make(CONVERSIONS[tensor.dtype.name, wanted.name](tensor.handle.data), wanted, tensor.type.is_block())

    return converted


def _expansion(slow: Operation) -> Operation:
    def expanded(tensor: Any, places: Any, **more: Any) -> Any:
        if (
            more
            or type(places) is not tuple
            or not tensor.type.is_block()
            or tensor.handle.data.ndim + 1 != len(places)
        ):
            return slow(tensor, places, **more)
        if [place for place in places if place is not None and place != slice(None)] or places.count(None) != 1:
            return slow(tensor, places)
        return make(tensor.handle.data[places], tensor.dtype, True)

    return expanded


def _load(slow: Operation) -> Operation:
    def loaded(pointer: Any, mask: Any = None, other: Any = None, **more: Any) -> Any:
        element, data = pointer.dtype.element_ty, pointer.handle.data
        known = not more.keys() - ADVICE and element.name in NUMPY_TYPES and element.name != "int1"
        if not known or (mask is not None and not _covers(mask, pointer)):
            return slow(pointer, mask, other, **more)
        missing = other.value if type(other) is tl.constexpr else other
        if mask is None and missing is not None:
            return slow(pointer, mask, other, **more)
        if missing is None or (type(missing) in (int, float) and _is_zero(missing)):
            filled = np.zeros(data.shape, NUMPY_TYPES[element.name])
        elif _takes(element.name, missing):
            filled = np.full(data.shape, missing, NUMPY_TYPES[element.name])
        else:
            return slow(pointer, mask, other, **more)
        covered = np.ones(data.shape, bool) if mask is None else mask.handle.data
        read = interpreter._interpreter.load(data, covered, filled, filled.dtype)
        return make(read, element, pointer.type.is_block())

    return loaded


def _covers(mask: Any, pointer: Any) -> bool:
    if type(mask) is not tl.tensor or mask.dtype.name != "int1" or mask.type.is_block() != pointer.type.is_block():
        return False
    return mask.handle.data.shape == pointer.handle.data.shape
