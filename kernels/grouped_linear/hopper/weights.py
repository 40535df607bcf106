"""Stored weights in shared memory become the first operand of a product, in registers.

They are values times factors, rounded once. An operand of 16-bit values has in each thread, of each row, two neighbours
of every eight columns. So a thread takes two bytes of fp8 or one of mxfp4 at a time from shared memory, in the places
where their values are wanted.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Columns with one factor.
FP8_BLOCK = gl.constexpr(128)
MX_BLOCK = gl.constexpr(32)


@gluon.constexpr_function
def bytes_layout(rows, warps):
    """The layout of MX_BLOCK columns' bytes [rows, 16] in which each has its two values' place in the operand."""
    columns = [[0, 4], [0, 8]]
    blocks = [[16 * warps << bit, 0] for bit in range((rows // (16 * warps)).bit_length() - 1)]
    by_warp = [[16 << bit, 0] for bit in range(warps.bit_length() - 1)]
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[8, 0], *columns, *blocks], lanes, by_warp, [], [rows, 16])


@gluon.jit
def fp8_operand(stage, first, factor, dtype: gl.constexpr, OPERAND: gl.constexpr):
    """Returns 64 columns of a stage from `first` on times one factor."""
    return (stage.slice(first, 64, 1).load(OPERAND).to(gl.float32) * factor).to(dtype)


@gluon.jit
def mxfp4_operand(stage, block, exponents, BYTES: gl.constexpr, OPERAND: gl.constexpr):
    """Returns MX_BLOCK columns of a stage in bfloat16; byte `block` of `exponents` [rows] is theirs.

    The three low bits of e2m1 are exponent and mantissa of bfloat16 once they lie where these meet: a number 2**126
    times as small, 0 and 0.5 included. Both products are exact, but for the last one's rounding to a subnormal number,
    which is that of the fp32 product. One product would not do: 2**126 times a factor above 2 is no number.
    """
    pairs = stage.slice(16 * block, 16, 1).load(BYTES).to(gl.int32)
    exponent = (exponents >> (8 * block)) & 255
    # In both halves a power of two; 2**-127 is a subnormal number.
    factor = gl.zeros_like(pairs) + gl.maximum(exponent * 0x00800080, 0x00400040)[:, None]
    low, high = gl.inline_asm_elementwise(
        """{
        .reg .b32 number, sign, power;
        mul.lo.u32 number, $2, 0x00040040;
        mul.lo.u32 sign, $2, 0x01001000;
        and.b32 number, number, 0x01C001C0;
        lop3.b32 number, sign, 0x80008000, number, 0xEA;
        mov.b32 power, 0x7E807E80;
        mul.rn.bf16x2 number, number, power;
        mul.rn.bf16x2 number, number, $3;
        mov.b32 {$0, $1}, number;
        }""",
        "=h,=h,r,r",
        [pairs, factor],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=1,
    )
    joined = gl.join(low, high).reshape([pairs.shape[0], MX_BLOCK])
    return gl.convert_layout(joined, OPERAND, assert_trivial=True)


@gluon.jit
def exponents_of_step(scales_row, step, blocks, COUNT: gl.constexpr, WORD_BYTES: gl.constexpr):
    """Returns the COUNT exponents of each row for a step as the bytes of int32s, in one load or in halves.

    `scales_row` points to rows that have `blocks` exponents each.
    """
    first = step * COUNT
    if COUNT == 4 and WORD_BYTES == 4:
        words = scales_row.to(gl.pointer_type(gl.int32), bitcast=True)
        return gl.load(words + step, mask=first < blocks, other=0)
    halves = scales_row.to(gl.pointer_type(gl.int16), bitcast=True) + first // 2
    exponents = gl.load(halves, mask=first < blocks, other=0).to(gl.int32)
    if COUNT == 4:
        high = gl.load(halves + 1, mask=first + 2 < blocks, other=0).to(gl.int32)
        exponents = (exponents & 0xFFFF) | (high << 16)
    return exponents
