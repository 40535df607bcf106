"""Stored weights in shared memory become the first operand of a product, in registers.

They are values times factors, rounded once. An operand of 16-bit values has in each thread, of each row, two neighbours
of every eight columns. A thread takes two bytes of fp8 at a time from shared memory, in the places where their values
are wanted, or one word, which has its eight values of 32 columns of mxfp4 or its four of 16 columns of fp8
(kernels/grouped_linear/words.py).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Rows and columns of a block of words.
BLOCK = gl.constexpr(128)
# Columns with one factor.
FP8_BLOCK = gl.constexpr(128)
MX_BLOCK = gl.constexpr(32)


@gluon.constexpr_function
def words_layout(rows, warps, words=4):
    """The layout of words [rows, words], four for MX_BLOCK columns of mxfp4 or 16 of fp8, in which each lies where its
    values are wanted."""
    columns = [[0, 4 << bit] for bit in range((words // 4).bit_length() - 1)]
    blocks = [[16 * warps << bit, 0] for bit in range((rows // (16 * warps)).bit_length() - 1)]
    by_warp = [[16 << bit, 0] for bit in range(warps.bit_length() - 1)]
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[8, 0], *columns, *blocks], lanes, by_warp, [], [rows, words])


@gluon.jit
def fp8_operand(stage, first, factor, dtype: gl.constexpr, OPERAND: gl.constexpr):
    """Returns 64 columns of a stage from `first` on times one factor."""
    return (stage.slice(first, 64, 1).load(OPERAND).to(gl.float32) * factor).to(dtype)


@gluon.constexpr_function
def _fp8_instructions(has_rest):
    """Each pair of a word becomes numbers 2**120 times as small, then weights."""
    weigh = "mul.rn.bf16x2 rest, number, $6; fma.rn.bf16x2 number, number, $5, rest;"
    if not has_rest:
        weigh = "mul.rn.bf16x2 number, number, $5;"
    return f"""{{
        .reg .b32 number, mantissa, rest;
        and.b32 number, $4, 0x87F087F0;
        {weigh}
        mov.b32 {{$0, $1}}, number;
        shf.r.wrap.b32 number, $4, $4, 4;
        and.b32 number, number, 0x87808780;
        shl.b32 mantissa, $4, 4;
        lop3.b32 number, mantissa, 0x00700070, number, 0xEA;
        {weigh}
        mov.b32 {{$2, $3}}, number;
        }}"""


@gluon.jit
def fp8_words_operand(stage, first, factor, dtype: gl.constexpr, WARPS: gl.constexpr, OPERAND: gl.constexpr):
    """Returns 64 columns from `first` on of a stage in words (kernels/grouped_linear/words.py), times one factor: of
    int32 a head, of int64 a head and a rest.

    Exponent and mantissa of e4m3 are those of a bfloat16 number once they lie where these meet: one 2**120 times as
    small, subnormal ones included.
    """
    ROWS: gl.constexpr = stage.shape[0]
    HAS_REST: gl.constexpr = factor.dtype == gl.int64
    words = stage.slice(first // 4, 16, 1).load(words_layout(ROWS, WARPS, 16))
    head = gl.zeros_like(words) + factor.to(gl.int32)
    rest = gl.zeros_like(words) + (factor.to(gl.int64) >> 32).to(gl.int32)
    a, b, c, d = gl.inline_asm_elementwise(
        _fp8_instructions(HAS_REST),
        "=h,=h,=h,=h,r,r,r",
        [words, head, rest],
        dtype=(gl.bfloat16,) * 4,
        is_pure=True,
        pack=1,
    )
    # [rows, g, t, h, i] of columns 16 g + 8 h + 2 t + i.
    values = gl.join(gl.join(a, c), gl.join(b, d)).reshape([ROWS, 4, 4, 2, 2])
    columns = values.permute((0, 1, 3, 2, 4)).reshape([ROWS, 64])
    return gl.convert_layout(columns, OPERAND, assert_trivial=True).to(dtype)


@gluon.jit
def mxfp4_operand(stage, block, exponents, dtype: gl.constexpr, WORDS: gl.constexpr, OPERAND: gl.constexpr):
    """Returns MX_BLOCK columns of a stage; theirs is byte `block` of `exponents` [rows].

    Exponent and mantissa of e2m1 are those of a bfloat16 number once they lie where these meet: one 2**126 times as
    small, 0 and 0.5 included. Its product by 2**(exponent - 1) is exact, but for the rounding to a subnormal number,
    which is that of the fp32 product.
    """
    words = stage.slice(4 * block, 4, 1).load(WORDS)
    exponent = (exponents >> (8 * block)) & 255
    # The power of two in both halves.
    power = gl.zeros_like(words) + (exponent * 0x00800080 + 0x3F003F00)[:, None]
    a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
        """{
        .reg .b32 number, sign;
        and.b32 number, $8, 0x81C081C0;
        mul.rn.bf16x2 number, number, $9;
        mov.b32 {$0, $1}, number;
        shl.b32 number, $8, 3;
        and.b32 number, number, 0x81C081C0;
        mul.rn.bf16x2 number, number, $9;
        mov.b32 {$2, $3}, number;
        shl.b32 sign, $8, 1;
        shr.u32 number, $8, 3;
        and.b32 number, number, 0x01C001C0;
        lop3.b32 number, sign, 0x80008000, number, 0xEA;
        mul.rn.bf16x2 number, number, $9;
        mov.b32 {$4, $5}, number;
        shl.b32 sign, $8, 2;
        shl.b32 number, $8, 6;
        and.b32 number, number, 0x01C001C0;
        lop3.b32 number, sign, 0x80008000, number, 0xEA;
        mul.rn.bf16x2 number, number, $9;
        mov.b32 {$6, $7}, number;
        }""",
        "=h,=h,=h,=h,=h,=h,=h,=h,r,r",
        [words, power],
        dtype=(gl.bfloat16,) * 8,
        is_pure=True,
        pack=1,
    )
    # [rows, t, i, h, s] of columns 16 s + 8 h + 2 t + i.
    values = gl.join(gl.join(gl.join(a, b), gl.join(c, d)), gl.join(gl.join(e, f), gl.join(g, h)))
    columns = values.permute((0, 4, 3, 1, 2)).reshape([words.shape[0], MX_BLOCK])
    return gl.convert_layout(columns, OPERAND, assert_trivial=True).to(dtype)


@gluon.jit
def exponents_of_step(exponents_row, step, words, COUNT: gl.constexpr):
    """Returns the COUNT exponents of each row for a step, two or four, in the low bytes; a row has `words` words."""
    word = step * COUNT // 4
    exponents = gl.load(exponents_row + word, mask=word < words, other=0)
    return exponents >> (8 * (step * COUNT % 4))
