"""Online softmax of key tiles that looks for maxima only where one may matter.

A weight is 2^(score - base), scores in units of log2. A row's base is the largest score of its first key tile. It moves
only for a score that lies more than LEAD above it, so weights stay below 2^LEAD, which fp32, bf16 and fp16 hold, and
nearly all tiles leave all bases as they are. Such a tile needs no maxima, and earlier sums no factors.

So weights are made with the bases that there are. The sum of a thread's weights, which is needed anyway, is beyond
LOOK if a score lies LEAD above its base; only then does its warp find maxima. Whether a base moves follows from the
row's own scores: a row for which a warp looked in vain keeps what it has.

A base moves by a whole number, so that weights need not be made again: powers of two change no digit. It moves ROOM
beyond the score, so that scores that go on rising do not move it again at once. Only a score that lies FAR above a base
becomes the base itself. Weights of fp16 have no such room: there every score that moves a base becomes it.

The loop of mla_prefill has 340 instructions for a key tile so, in place of 490 (ADR 36).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.hopper.registers import packed
from kernels.softmax.triton import NO_KEYS

LEAD = gl.constexpr(15.0)
FAR = gl.constexpr(60.0)
ROOM = gl.constexpr(40.0)
# Below 2^LEAD, since exp2 is not exact.
LOOK = gl.constexpr(16384.0)


@gluon.jit
def declare_looks():
    """Declares the register in which `any_in_warp` hands on its answer. Called once, before all that may ask."""
    gl.inline_asm_elementwise(".reg .b32 looks; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def any_in_warp(x, LIMIT: gl.constexpr):
    """Returns whether a number of the calling warp, two of each thread, is not at most LIMIT.

    This scalar differs from warp to warp, for which Gluon has no word: a reduction would wait for all warps.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.le.f32 p, $2, $4; setp.le.and.f32 p, $3, $5, p; vote.sync.all.pred p, p, 0xffffffff;"
        " selp.b32 looks, 0, 1, p; mov.b32 $0, 0; mov.b32 $1, 0; }",
        "=r,=r,f,f,f,f",
        [x, gl.full_like(x, LIMIT)],
        dtype=gl.int32,
        is_pure=False,
        pack=2,
    )
    return gl.inline_asm_elementwise("mov.b32 $0, looks;", "=r", [], dtype=gl.int32, is_pure=False, pack=1) != 0


@gluon.jit
def weigh(scores, base, scale, ROWWISE: gl.constexpr = False):
    """Returns a tile's weights; `scale` turns scores into units of log2, each row's with ROWWISE."""
    factor = gl.zeros_like(scores) + (gl.expand_dims(scale, 1) if ROWWISE else scale)
    return gl.exp2(gl.fma(scores, factor, gl.expand_dims(-base, 1) + gl.zeros_like(scores)))


@gluon.jit
def sums_in_two(weights):
    """Returns sums [rows, 4] of the first quarter of a tile's weights, and of the rest.

    Each of the four threads that hold a row's weights adds up its own.
    """
    ROWS: gl.constexpr = weights.shape[0]
    EIGHTS: gl.constexpr = weights.shape[1] // 32
    quarters = gl.sum(gl.sum(weights.reshape([ROWS, 4, EIGHTS, 4, 2]), 4), 2)
    even, odd = gl.split(quarters.reshape([ROWS, 2, 2, 4]).permute((0, 1, 3, 2)))
    first, third = gl.split(even.permute((0, 2, 1)))
    second, last = gl.split(odd.permute((0, 2, 1)))
    return first, second + (third + last)


@gluon.jit
def thread_sums(weights):
    """Returns both together."""
    first, rest = sums_in_two(weights)
    return first + rest


@gluon.jit
def _multiplied(p, factor):
    """Returns 16-bit weights times their rows' factors."""
    return gl.inline_asm_elementwise(
        "mul.rn.bf16x2 $0, $1, $2;" if p.dtype == gl.bfloat16 else "mul.rn.f16x2 $0, $1, $2;",
        "=r,r,r",
        [p, gl.expand_dims(factor, 1).to(p.dtype)],
        dtype=p.dtype,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def _columns(x, like):
    """Returns a number of each row as a column beside a tensor."""
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, like.type.layout)), 1)


@gluon.jit
def leads(scores, base, scale):
    """Returns a tile's largest scores, and how far they lie above their rows' bases."""
    top = gl.max(scores, 1)
    return top, gl.fma(top, gl.zeros_like(top) + scale, -base)


@gluon.constexpr_function
def _near(dtype):
    """Returns the most that a score may lie above its base for its weight to be of use."""
    return FAR.value if dtype == gl.bfloat16 else LEAD.value  # fp16 holds no weight beyond 2^16


@gluon.jit
def new_bases(top, lead, base, scale, DTYPE: gl.constexpr):
    """Returns (bases, by how many whole numbers they moved, which of them became a score) for a tile's `leads`."""
    NEAR: gl.constexpr = _near(DTYPE)
    far = lead > NEAR
    steps = gl.where((lead > LEAD) & (lead <= NEAR), lead + ROOM, -1.0).to(gl.int32) + 1
    return gl.where(far, top * scale, base + steps.to(gl.float32)), steps, far


@gluon.jit
def rebased(scores, top, lead, p, sums, base, scale, ROWWISE: gl.constexpr = False):
    """Returns (16-bit weights, their threads' sums, bases, factors of what came before) with the bases moved."""
    NEAR: gl.constexpr = _near(p.dtype)
    new_base, steps, far = new_bases(top, lead, base, scale, p.dtype)
    factor = ((127 - steps) << 23).to(gl.float32, bitcast=True)
    if any_in_warp(lead, NEAR):
        # Rows that are not far get the weights that they have.
        weights = weigh(scores, gl.where(far, new_base, base), scale, ROWWISE)
        p = packed(weights.to(p.dtype))
        sums = gl.convert_layout(thread_sums(weights), sums.type.layout)
    p = _multiplied(p, factor)
    sums = sums * _columns(factor, sums)
    return p, sums, new_base, gl.where(far, gl.exp2(base - new_base), factor)


@gluon.jit
def row_sums(sums, base):
    """Returns the sums of four threads each, laid out as the rows' bases are."""
    return gl.convert_layout(gl.sum(sums, 1), base.type.layout)


@gluon.jit
def first_weights(scores, scale, DTYPE: gl.constexpr, ROWWISE: gl.constexpr = False):
    """Returns (16-bit weights, their threads' sums, bases) of a first key tile."""
    base = gl.maximum(gl.max(scores, 1), NO_KEYS) * scale
    weights = weigh(scores, base, scale, ROWWISE)
    return packed(weights.to(DTYPE)), thread_sums(weights), base


@gluon.jit
def next_weights(scores, weights, sums, base, row_sum, acc, scale, DTYPE: gl.constexpr, ROWWISE: gl.constexpr = False):
    """Returns (16-bit weights, their threads' sums, bases, row_sum, acc) with a later key tile.

    `weights` and `sums` are the tile's, made with the bases that are given. row_sum and acc, of the tiles before, are
    scaled where a base moves.
    """
    p = packed(weights.to(DTYPE))
    if any_in_warp(sums, LOOK):
        top, lead = leads(scores, base, scale)
        if any_in_warp(lead, LEAD):
            p, sums, base, factor = rebased(scores, top, lead, p, sums, base, scale, ROWWISE)
            row_sum = row_sum * factor
            acc = acc * _columns(factor, acc)
    return p, sums, base, row_sum, acc
