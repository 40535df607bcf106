"""What Triton's interpreter does to an operation's operands, without the work where they fit already.

Checks and conversions of operands were a third of the interpreter's time.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as interpreter


def unless_same(equal: Callable[..., bool]) -> Callable[..., bool]:
    return lambda self, other: self is other or equal(self, other)


def unless_tensor(unwrap: Callable[..., Any]) -> Callable[..., Any]:
    bare = {tl.tensor, tl.dtype, int, float, bool, str, type(None)}
    return lambda value: value if type(value) in bare else unwrap(value)


def unless_alike(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    """Operands of one shape stay as they are, and a scalar beside a block becomes a block at once."""

    def broadcasted(self: Any, lhs: Any, rhs: Any) -> Any:
        left_block, right_block = lhs.type.is_block(), rhs.type.is_block()
        if left_block != right_block:
            return (lhs, _splat(rhs, lhs.type)) if left_block else (_splat(lhs, rhs.type), rhs)
        if not left_block or lhs.type.shape is rhs.type.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    return broadcasted


def _splat(scalar: Any, block: Any) -> Any:
    data, kind = scalar.handle.data, scalar.dtype
    filled = interpreter.TensorHandle(np.full(tuple(block.shape), data, dtype=data.dtype), kind)
    return tl.tensor(filled, block if block.scalar is kind else block.with_element_ty(kind))


def unless_plain(convert: Callable[..., Any]) -> Callable[..., Any]:
    """Operands of one type are not converted, and a number beside a tensor becomes a tensor of its type at once."""
    plain = {"int32": int, "int64": int, "fp32": float}

    def fits(number: Any) -> bool:
        return isinstance(number, float) or abs(number) < 1 << 31

    def converted(self: Any, lhs: Any, rhs: Any, *allowed: Any, **more: Any) -> Any:
        """`allowed` are pointers on each side; a third one says that the operation does no arithmetic."""
        if not isinstance(lhs, tl.tensor):
            return convert(self, lhs, rhs, *allowed, **more)
        scalar = lhs.type.scalar
        if isinstance(rhs, tl.tensor):
            if rhs.type.scalar is scalar and (scalar.name in plain or scalar.name == "int1"):
                return self.broadcast_impl_value(lhs, rhs)
        elif type(rhs) is plain.get(scalar.name) and fits(rhs) and len(allowed) != 3 and not more:
            shape = tuple(lhs.type.shape) if lhs.type.is_block() else (1,)
            data = np.full(shape, rhs, dtype=lhs.handle.data.dtype)
            return lhs, tl.tensor(interpreter.TensorHandle(data, scalar), lhs.type)
        return convert(self, lhs, rhs, *allowed, **more)

    return converted
