"""Quantized (fp8) tiles as operands of products: dequantized to fp16 on their way to registers.

A product takes its rows from registers in an order that byte-wise data does not lie in, so both tiles come in an order
of their own: a row of keys with its dims dealt out in quarters (the queries' dims follow suit), and values with the
dims of a pair of rows side by side (the sums' rows follow suit). Every e4m3 value is exact in fp16.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def dims_at_once(dim):
    """How much of a tile's keys registers hold beside the sums."""
    return dim if dim <= 128 else 64


@gluon.jit
def key_operand(tile, PRODUCT: gl.constexpr):
    """A tile of keys [TILE, D] as rows of a product; their dims are `dealt`."""
    TILE: gl.constexpr = tile.shape[0]
    D: gl.constexpr = tile.shape[1]
    gl.static_assert(TILE == 64)
    LAYOUT: gl.constexpr = quarter_rows(D)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 2)
    return gl.convert_layout(dealt(tile.load(LAYOUT).to(gl.float16), D), OPERAND, assert_trivial=True)


@gluon.constexpr_function
def quarter_rows(dim):
    """A thread has a quarter of two rows each."""
    columns = [[0, 1 << bit] for bit in range((dim // 4).bit_length() - 1)]
    lanes = [[0, dim // 4], [0, dim // 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([*columns, [8, 0]], lanes, [[16, 0], [32, 0]], [], [64, dim])


@gluon.jit
def query_operand(q):
    """Queries [n, D] as fp16 with their dims `dealt`, and what each row's scores must be multiplied with, fp32 [n].

    A row's largest number is brought to 2^14 or just above by a power of two: bf16 reaches further than fp16.
    """
    top = gl.max(gl.abs(q.to(gl.float32)), 1)
    exponent = gl.maximum((top.to(gl.int32, bitcast=True) >> 23) - 127 - 14, -100)
    power = ((127 - exponent) << 23).to(gl.float32, bitcast=True)
    inverse = ((127 + exponent) << 23).to(gl.float32, bitcast=True)
    return dealt((q.to(gl.float32) * power[:, None]).to(gl.float16), dims_at_once(q.shape[1])), inverse


@gluon.jit
def dealt(x, BLOCK: gl.constexpr):
    """Rows [n, D] whose dims are dealt out by twos from the four quarters of each block of them.

    A thread of a product holds twos that lie eight apart: so they come from one quarter.
    """
    D: gl.constexpr = x.shape[1]
    parts = x.reshape([x.shape[0], D // BLOCK, 4, BLOCK // 8, 2])
    return parts.permute((0, 1, 3, 2, 4)).reshape(x.shape)


@gluon.jit
def value_operand(tile, at: gl.constexpr, KEYS: gl.constexpr, first, start, stop, PRODUCT: gl.constexpr):
    """KEYS values from `at` on of a tile [TILE, D] whose keys count from `first`: dims [D, KEYS] as in `value_dims`.

    Those of keys outside start..stop are 0: they may hold anything, even NaN.
    """
    TILE: gl.constexpr = tile.shape[0]
    D: gl.constexpr = tile.shape[1]
    PAIRS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=min(D, 128), element_bitwidth=16, rank=2)
    LAYOUT: gl.constexpr = paired_dims(KEYS, D)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 2)
    pairs = tile._reinterpret(gl.int16, [TILE, D // 2], PAIRS).slice(at, KEYS, 0).permute((1, 0)).load(LAYOUT)
    if (first + at < start) | (first + at + KEYS > stop):
        key = first + at + gl.arange(0, KEYS, gl.SliceLayout(0, LAYOUT))
        pairs = gl.where(((key >= start) & (key < stop))[None, :], pairs, 0)
    even, odd = gl.inline_asm_elementwise(
        """{
        .reg .b32 t;
        .reg .b16 low, high;
        prmt.b32 t, $2, $2, 0x3120;
        mov.b32 {low, high}, t;
        cvt.rn.f16x2.e4m3x2 $0, low;
        cvt.rn.f16x2.e4m3x2 $1, high;
        }""",
        "=r,=r,r",
        [pairs],
        dtype=(gl.float16, gl.float16),
        is_pure=True,
        pack=2,
    )
    both = gl.join(even, odd).reshape([D // 16, 8, KEYS, 2]).permute((0, 3, 1, 2)).reshape([D, KEYS])
    return gl.convert_layout(both, OPERAND, assert_trivial=True)


@gluon.constexpr_function
def paired_dims(keys, dim):
    """As the rows of a product lie, but for the bit that a pair holds."""
    columns = [[0, 1], *([0, 8 << bit] for bit in range((keys // 16).bit_length()))]
    blocks = [[32 << bit, 0] for bit in range((dim // 64).bit_length() - 1)]
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([*columns, *blocks], lanes, [[8, 0], [16, 0]], [], [dim // 2, keys])


@gluon.jit
def value_dims(D: gl.constexpr, PAIRED: gl.constexpr, LAYOUT: gl.constexpr):
    """The dim that each row of a tile's sums is of."""
    row = gl.arange(0, D, LAYOUT)
    if PAIRED:
        row = row // 16 * 16 + row % 8 * 2 + row // 8 % 2
    return row
