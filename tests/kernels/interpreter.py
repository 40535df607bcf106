"""Mends Triton's CPU interpreter, so that what it computes is what a GPU would.

Holds for Triton 3.6 and 3.7, and must run before the first launch of a process that has TRITON_INTERPRET=1 set since
before Triton was imported:

    what goes wrong                                              what is done here
    loops with tensor bounds die under numpy >= 2.4 (3.6 only)   a scalar tensor gives its item
    a dot of bf16 works on the raw bit patterns                  operands are widened first
    an fp32 dot's rows depend on their place in the tile         accumulation in fp64, rounded once
    fp32 -> bf16 truncates                                       rounds to nearest even
    fp32 -> fp8 drops subnormals and carries, and wraps          rounds to nearest even, saturates
    fp8 -> fp32 is wrong for subnormals and NaN                  looked up by code
    bf16 arithmetic and reductions work on the raw bits          refused: a kernel computes in fp32
    numpy warns of inf - inf and log2(0), as no GPU does         silenced during a launch
    outputs are copied onto themselves, which touches all of     skipped
    a large pool
    int32 overflow is computed with five operations, half of     computed by numpy, and told
    the time, and never told
    operands of one type are converted to it all the same, and   passed as they are (interpreter_operands.py)
    every comparison of types and constant is unwrapped
    reductions and scans by a kernel's own function go element   a slice of the axis at a time
    by element
    a sort runs its network of comparisons                       done by numpy
    each call of a jitted function patches the language again,   once a launch
    and each operation makes its shapes and tables of types      once each
    anew: another quarter of the time
    each sum of two scalars goes the same long way through       short ways for plain operands
    types, conversions and checks: half of what was left         (interpreter_arithmetic.py)
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as interpreter

from tests.kernels.interpreter_arithmetic import as_tensor, constant_shape, quick_ways
from tests.kernels.interpreter_formats import E4M3_VALUES, round_to_bf16, round_to_e4m3, widen_bf16
from tests.kernels.interpreter_loops import reduce_slices, scan_slices, sort_rows
from tests.kernels.interpreter_operands import unless_alike, unless_plain, unless_same, unless_tensor

_mended = False
# Modules of the language that the launch in progress has patched.
_patched: set[int] = set()


def mend() -> None:
    """Replaces what is wrong, once."""
    global _mended
    if _mended:
        return
    _mended = True
    builder = interpreter.InterpreterBuilder
    interpreter._patch_lang_tensor = _with_scalar_index(interpreter._patch_lang_tensor)
    interpreter._patch_lang = _once_a_launch(interpreter._patch_lang)
    interpreter._patch_attr = patched_by(quick_ways())
    tl.dtype.__eq__ = unless_same(tl.dtype.__eq__)
    tl.core._unwrap_if_constexpr = unless_tensor(tl.core._unwrap_if_constexpr)
    interpreter._get_np_dtype = _looked_up_once(interpreter._get_np_dtype)
    interpreter._convert_float = _with_rounding(interpreter._convert_float)
    builder.create_dot = _with_exact_rows(builder.create_dot)
    builder.binary_op = _without_bf16(builder.binary_op)
    interpreter.ReduceOps.apply_impl = _without_bf16_input(interpreter.ReduceOps.apply_impl)
    interpreter.ReduceOps.generic_reduce = reduce_slices
    interpreter.ScanOps.generic_scan = scan_slices
    tl.sort = sort_rows
    semantic = type(interpreter.interpreter_semantic)
    semantic.binary_op_sanitize_overflow_impl = _tell_overflow
    semantic.to_tensor = as_tensor(semantic.to_tensor)
    semantic.broadcast_impl_value = unless_alike(semantic.broadcast_impl_value)
    semantic.binary_op_type_checking_impl = unless_plain(semantic.binary_op_type_checking_impl)
    tl.block_type.__init__ = _with_known_shapes(tl.block_type.__init__)
    tl.tensor.__init__ = _make_tensor
    executor = interpreter.GridExecutor
    executor._restore_args_dev = _only_what_moved(executor._restore_args_dev)
    executor.__call__ = _silenced(executor.__call__)


def _with_scalar_index(patch: Callable[..., None]) -> Callable[..., None]:
    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    return patched


def _once_a_launch(patch: Callable[..., Any]) -> Callable[..., Any]:
    languages: dict[Any, set[int]] = {}

    def patched(function: Any) -> Any:
        if function not in languages:
            languages[function] = {id(tl), id(tl.core)} & {id(value) for value in function.__globals__.values()}
        known = languages[function]
        if known <= _patched:
            return interpreter._LangPatchScope()
        _patched.update(known)
        return patch(function)

    return patched


def patched_by(ways: dict[Any, Any]) -> Callable[..., None]:
    """Returns what replaces an attribute of the language, with a quick way before it if there is one."""

    @cache
    def replacement(member: Any) -> Any:
        return ways[member](with_semantic(member)) if member in ways else with_semantic(member)

    def patched(scope_of: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        scope.set_attr(scope_of, name, replacement(member))

    return patched


def with_semantic(member: Callable[..., Any]) -> Callable[..., Any]:
    semantic = interpreter.interpreter_semantic

    def called(*args: Any, **more: Any) -> Any:
        more["_semantic"] = semantic
        return member(*args, **more)

    return called


def _looked_up_once(get: Callable[..., Any]) -> Callable[..., Any]:
    of_number = cache(get)

    def looked_up(dtype: Any) -> Any:
        scalar = dtype.scalar  # what a block has is its elements' type; blocks and pointers have no hash
        return get(scalar) if isinstance(scalar, tl.pointer_type) else of_number(scalar)

    return looked_up


def _tell_overflow(semantic: Any, lhs: Any, rhs: Any, operation: Callable[..., Any]) -> None:
    """Raises AssertionError where a sum, difference or product of integers leaves their type."""
    a, b = lhs.handle.data, rhs.handle.data
    if a.dtype.kind not in "iu" or a.dtype.itemsize == 8:
        return
    exact = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[operation.__name__]
    wide, limits = exact(a, b, dtype=np.int64), np.iinfo(a.dtype)
    fits = limits.min <= wide.min(initial=0) and wide.max(initial=0) <= limits.max
    assert fits, f"{a.dtype} overflow in {operation.__name__}"


def _with_known_shapes(make: Callable[..., None]) -> Callable[..., None]:
    """Types of blocks with one shape share it, and are checked once."""
    known: dict[tuple[int, ...], tuple[Any, int]] = {}

    def made(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([getattr(size, "value", size) for size in shape])
        if sizes not in known:
            make(self, element_ty, shape)
            known[sizes] = self.shape, self.numel
            return
        self.element_ty = element_ty
        self.shape, self.numel = known[sizes]
        self.name = f"<{sizes}, {element_ty}>"

    return made


def _make_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = constant_shape(tuple(type.shape) if type.is_block() else ())


def _with_rounding(convert: Callable[..., Any]) -> Callable[..., Any]:
    nearest_even = (None, interpreter._ir.ROUNDING_MODE.RTNE)

    def converted(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source == tl.float32 and target == tl.bfloat16 and rounding in nearest_even:
            return round_to_bf16(data)
        if source == tl.float32 and target == tl.float8e4nv and rounding in nearest_even:
            return round_to_e4m3(data)
        if source == tl.bfloat16 and target == tl.float32:
            return widen_bf16(data)
        if source == tl.float8e4nv and target == tl.float32:
            return E4M3_VALUES[data]
        return convert(data, source, target, rounding)

    return converted


def _widened(handle: Any) -> Any:
    if handle.dtype.scalar == tl.bfloat16:
        return widen_bf16(handle.data)
    return handle.data


def _with_exact_rows(create_dot: Callable[..., Any]) -> Callable[..., Any]:
    def dot(self: Any, a: Any, b: Any, acc: Any, precision: Any, max_imprecise: Any) -> Any:
        if acc.data.dtype != np.float32 or min(a.dtype.primitive_bitwidth, b.dtype.primitive_bitwidth) < 16:
            return create_dot(self, a, b, acc, precision, max_imprecise)
        product = np.matmul(_widened(a).astype(np.float64), _widened(b).astype(np.float64))
        return interpreter.TensorHandle((product + acc.data).astype(np.float32), acc.dtype.scalar)

    return dot


def _without_bf16(binary_op: Callable[..., Any]) -> Callable[..., Any]:
    def checked(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if tl.bfloat16 in (lhs.dtype.scalar, rhs.dtype.scalar):
            raise TypeError("bf16 arithmetic in the interpreter: cast to fp32 first")
        return binary_op(self, lhs, rhs, op)

    return checked


def _without_bf16_input(apply_impl: Callable[..., Any]) -> Callable[..., Any]:
    def checked(self: Any, values: Any) -> Any:
        if any(value.handle.dtype.scalar == tl.bfloat16 for value in values):
            raise TypeError("reduction of bf16 in the interpreter: cast to fp32 first")
        return apply_impl(self, values)

    return checked


def _silenced(launch: Callable[..., None]) -> Callable[..., None]:
    def launched(self: Any, *args: Any, **kwargs: Any) -> None:
        _patched.clear()
        try:
            with np.errstate(all="ignore"):
                launch(self, *args, **kwargs)
        finally:
            _patched.clear()

    return launched


def _only_what_moved(restore: Callable[..., None]) -> Callable[..., None]:
    def restored(self: Any, args: Any, host_args: Any, kwargs: Any, host_kwargs: Any) -> None:
        tensors = [(a, h) for a, h in zip(args, host_args, strict=True) if hasattr(a, "data_ptr")]
        if any(a.untyped_storage().data_ptr() != h.untyped_storage().data_ptr() for a, h in tensors):
            restore(self, args, host_args, kwargs, host_kwargs)

    return restored
