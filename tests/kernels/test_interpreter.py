"""What tests/kernels/interpreter.py makes of Triton's interpreter, where no op's test would show it."""

from typing import Any

import pytest
import torch

from tests.kernels.conftest import INTERPRETING

np = pytest.importorskip("numpy")
triton = pytest.importorskip("triton")
tl = triton.language
interpreter = pytest.importorskip("triton.runtime.interpreter")

pytestmark = pytest.mark.skipif(not INTERPRETING, reason="needs the interpreter")


@triton.jit
def square(numbers_ptr, out_ptr, N: tl.constexpr):  # noqa: N803
    at = tl.arange(0, N)
    number = tl.load(numbers_ptr + at)
    tl.store(out_ptr + at, number * number)


def squared(number: int, dtype: torch.dtype) -> int:
    out = torch.zeros(4, dtype=dtype)
    square[(1,)](torch.tensor([1, 2, 3, number], dtype=dtype), out, N=4)
    return int(out[3])


def test_an_overflow_of_int32_is_told() -> None:
    assert squared(46_340, torch.int32) == 46_340**2
    with pytest.raises(triton.runtime.errors.InterpreterError, match="int32 overflow in mul"):
        squared(46_341, torch.int32)


def test_int64_does_not_overflow_there() -> None:
    assert squared(46_341, torch.int64) == 46_341**2


@triton.jit
def decayed(factor, total, next_factor, number):
    """Neither commutes nor rounds alike in another order."""
    return factor * next_factor, total * next_factor + number


@triton.jit
def reduce_and_scan(numbers_ptr, out_ptr, total_ptr, N: tl.constexpr, M: tl.constexpr, AXIS: tl.constexpr):  # noqa: N803
    rows, columns = tl.arange(0, N)[:, None], tl.arange(0, M)[None, :]
    numbers = tl.load(numbers_ptr + rows * M + columns)
    halves = tl.full((N, M), 0.7, tl.float32)
    _, scanned = tl.associative_scan((halves, numbers), AXIS, decayed)
    tl.store(out_ptr + rows * M + columns, scanned)
    _, total = tl.reduce((halves, numbers), AXIS, decayed, keep_dims=True)
    tl.store(total_ptr + rows * M + columns, tl.broadcast_to(total, N, M))


@pytest.mark.parametrize("axis", [0, 1])
def test_a_kernels_own_function_goes_along_the_axis_in_order(axis: int) -> None:
    numbers = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    out, total = torch.empty(8, 4), torch.empty(8, 4)
    reduce_and_scan[(1,)](numbers, out, total, N=8, M=4, AXIS=axis)
    wanted = numbers.clone().movedim(axis, 0)
    for at in range(1, wanted.shape[0]):
        wanted[at] += wanted[at - 1] * 0.7
    assert torch.equal(out.movedim(axis, 0), wanted)
    assert torch.equal(total.movedim(axis, 0), wanted[-1:].expand_as(wanted))


@triton.jit
def sort_numbers(numbers_ptr, up_ptr, down_ptr, N: tl.constexpr, M: tl.constexpr):  # noqa: N803
    at = tl.arange(0, N)[:, None] * M + tl.arange(0, M)[None, :]
    numbers = tl.load(numbers_ptr + at)
    tl.store(up_ptr + at, tl.sort(numbers))
    tl.store(down_ptr + at, tl.sort(numbers, descending=True))


def test_rows_are_sorted() -> None:
    numbers = torch.randint(-50, 50, (4, 32), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    up, down = torch.empty_like(numbers), torch.empty_like(numbers)
    sort_numbers[(1,)](numbers, up, down, N=4, M=32)
    assert torch.equal(up, numbers.sort(-1).values) and torch.equal(down, up.flip(-1))


# Each type by numbers of both signs, and one that has to be rounded or leaves 32 bits in a product.
SAMPLES = {
    "int1": [True, False, True, True],
    "int32": [7, -7, 3, -46_341],
    "int64": [7, -7, 3, -(1 << 40)],
    "uint32": [7, 9, 3, 1 << 31],
    "fp16": [0.5, -1.25, 3.0, 7.1],
    "bf16": [0x3F80, 0xBF80, 0x4049, 0x7F80],
    "fp32": [0.5, -1.25, 3.0, -0.1],
}
SHAPES: list[tuple[int, ...] | None] = [None, (4,), (1,), (4, 1), (1, 4), (2, 2)]
NUMBERS = [3, -2, 0, 1 << 31, 0.0, -0.0, 2.5, 1e-40, float("-inf"), True, tl.constexpr(3), tl.constexpr(2.5)]
TWO_OPERANDS = [
    *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__floordiv__", "__mod__"),
    *("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__", "__and__", "__or__", "__xor__"),
    *("minimum", "maximum"),
]


def both_ways(name: str) -> tuple[Any, Any]:
    """Returns an operation of the language as the mended interpreter does it, and as Triton does."""
    from tests.kernels.interpreter import with_semantic
    from tests.kernels.interpreter_arithmetic import quick_ways

    member = getattr(tl.tensor if name.startswith("__") or name == "to" else tl.core, name)
    slow = with_semantic(member)
    return quick_ways()[member](slow), slow


def tensor_of(data: Any, kind: Any, shape: tuple[int, ...] | None) -> Any:
    return tl.tensor(interpreter.TensorHandle(data, kind), tl.block_type(kind, list(shape)) if shape else kind)


def as_numpy(kind: Any) -> Any:
    return interpreter._get_np_dtype(kind)


def operands() -> list[Any]:
    made = []
    for name, numbers in SAMPLES.items():
        kind = tl.core.dtype(name)
        for shape in SHAPES:
            data = np.array(numbers, as_numpy(kind))
            made.append(tensor_of(data[-1:] if shape in (None, (1,)) else data.reshape(shape), kind, shape))
    return made


def outcome(operation: Any, *sides: Any) -> Any:
    """Returns type, shape and bits of a result; that of an operation which is refused is the error's type."""
    try:
        with np.errstate(all="ignore"):
            result = operation(*sides)
    except Exception as error:
        return type(error)
    data, sizes = np.asarray(result.handle.data), [getattr(size, "value", size) for size in result.shape]
    kind = result.type.scalar.name, result.dtype.name, result.type.is_block(), sizes, result.numel.value
    return kind, data.dtype.name, data.shape, data.tobytes()


def check_both_ways(name: str, cases: list[tuple[Any, ...]], least: int) -> None:
    """Both ways give each case the same result or refusal; more than `least` have a result, or little was compared."""
    quick, slow = both_ways(name)
    results = 0
    for case in cases:
        wanted = outcome(slow, *case)
        assert outcome(quick, *case) == wanted, [getattr(side, "type", side) for side in case]
        results += isinstance(wanted, tuple)
    assert results > least


@pytest.mark.parametrize("name", TWO_OPERANDS)
def test_a_short_way_with_two_operands_is_tritons(name: str) -> None:
    tensors = operands()
    check_both_ways(name, [(left, right) for left in tensors for right in [*tensors, *NUMBERS]], 100)


def test_the_short_way_of_a_choice_is_tritons() -> None:
    tensors = operands()
    conditions = [tensor for tensor in tensors if tensor.dtype.name == "int1"]
    sides = [tensor for tensor in tensors if len(tensor.shape) != 1 and tensor.dtype.name not in ("uint32", "fp16")]
    pairs = [(x, y) for x in sides for y in [*sides, *NUMBERS]]
    check_both_ways("where", [(c, *pair) for c in conditions for x, y in pairs for pair in ((x, y), (y, x))], 1000)


def test_short_ways_of_conversions_and_new_axes_are_tritons() -> None:
    tensors, kinds = operands(), [tl.core.dtype(name) for name in SAMPLES]
    check_both_ways("to", [(tensor, kind) for tensor in tensors for kind in kinds], 100)
    all_of_it = slice(None)
    places = [(all_of_it, None), (None, all_of_it), (all_of_it, None, all_of_it), (None, all_of_it, all_of_it), None]
    check_both_ways("__getitem__", [(tensor, place) for tensor in tensors for place in places], 50)


@pytest.mark.parametrize("name", ["int1", "int32", "fp16", "bf16", "fp32"])
def test_the_short_ways_to_memory_are_tritons(name: str) -> None:
    memory = np.arange(4).astype(as_numpy(tl.core.dtype(name)))
    pointer = tensor_of(np.array([memory.ctypes.data], np.uint64), tl.pointer_type(tl.core.dtype(name)), None)
    tensors, (add, _) = operands(), both_ways("__add__")
    check_both_ways("__add__", [(pointer, offset) for offset in [*tensors, *NUMBERS]], 20)
    places = [
        tensor_of(np.arange(4, dtype=np.int32).reshape(shape), tl.int32, shape) for shape in ((4,), (4, 1), (2, 2))
    ]
    pointers = [pointer, *(add(pointer, place) for place in places)]
    masks = [None, *(tensor for tensor in tensors if tensor.dtype.name in ("int1", "int32"))]
    check_both_ways("load", [(p, mask, other) for p in pointers for mask in masks for other in [None, *NUMBERS]], 100)
