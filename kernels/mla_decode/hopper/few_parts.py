"""Parts and whole results where heads are few: products leave a thread some dimensions of some heads."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kernels.hopper.registers import opaque
from kernels.softmax.triton import MASKED


@gluon.jit
def store_heads(to_ptr, values, HEADS: gl.constexpr, ROWS: gl.constexpr):
    """Stores 256 dimensions [256, ROWS] of one query's heads, whose rows of an output or a part have 512.

    Of each 8 x 8 numbers a thread has two heads of a dimension, and gets two dimensions of a head: stores of 4 bytes.
    """
    turned = gl.inline_asm_elementwise(
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;",
        "=r,r",
        [values.to(gl.bfloat16)],
        dtype=gl.bfloat16,
        is_pure=False,
        pack=2,
    )
    rows = gl.permute(gl.reshape(turned, [32, 8, ROWS // 8, 8]), (2, 1, 0, 3))
    rows = gl.reshape(rows, [ROWS, 256])
    row = opaque(gl.arange(0, ROWS, gl.SliceLayout(1, rows.type.layout)))
    at = row[:, None] * 512 + gl.arange(0, 256, gl.SliceLayout(0, rows.type.layout))[None, :]
    if HEADS < ROWS:
        gl.store(to_ptr + at, rows, mask=(row < HEADS)[:, None])
    else:
        gl.store(to_ptr + at, rows)


@gluon.jit
def part_scores(levels_ptr, key, full, s, phase, HEADS: gl.constexpr, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """Returns scores [latents, rows] of a part in place of latents: a head sees one row, with the level as score.

    `full` are the barriers of a stage's halves and rotary part, which has nothing of a part but says that it is stored.
    """
    left_full, right_full, rope_full = full
    row = gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT))
    mbarrier.wait(rope_full.index(s), phase)
    # Past the first cache: another program has written them.
    levels = gl.load(levels_ptr + row % HEADS, volatile=True)
    scores = gl.where(key[:, None] == row[None, :], levels[None, :], MASKED)
    mbarrier.wait(left_full.index(s), phase)
    mbarrier.wait(right_full.index(s), phase)
    return scores
