"""Values that the compiler cannot see through, which keeps it from computing addresses early and holding them.

A kernel's loops have few registers to spare. What the compiler takes for constant it works out before a loop and keeps,
two registers for an address; what depends on an inline `mov` is worked out where it is used.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def opaque(x):
    """Returns int32 `x` unchanged; the compiler does not hoist what is computed from it."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def opaque_zero():
    """Returns an int32 0 that the compiler does not know to be 0."""
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def opaque_zero_of(x):
    """The same, computed anew wherever int32 `x` changes, as in each iteration of a loop."""
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def settled(x):
    """Returns fp32 `x`, two numbers a thread and none below -inf; waits that follow do not begin before it is known.

    The assembler moves waits ahead of arithmetic, but not ahead of a barrier: this one is never reached.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.lt.f32 p, $2, 0fFF800000; setp.lt.or.f32 p, $3, 0fFF800000, p;"
        " @p bar.sync 15, 128; mov.b32 $0, $2; mov.b32 $1, $3; }",
        "=&f,=&f,f,f",
        [x],
        dtype=gl.float32,
        is_pure=False,
        pack=2,
    )


@gluon.jit
def packed(p):
    """Returns 16-bit numbers unchanged, held in pairs from here on."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [p], dtype=p.dtype, is_pure=True, pack=2)
