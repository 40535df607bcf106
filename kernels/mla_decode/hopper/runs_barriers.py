"""Barriers of the latents that a kernel cut by load has on their way: of their halves and rotary parts, by stage."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def latent_barriers(STAGES: gl.constexpr):
    """Returns ((left full, left empty, right full, right empty), (rope full, rope empty)), not yet ready for use."""
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    left_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    left_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    rope_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    rope_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    right_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    right_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    return (left_full, left_empty, right_full, right_empty), (rope_full, rope_empty)


@gluon.jit
def init_latent_barriers(halves, rope, STAGES: gl.constexpr):
    """Makes them ready: one thread arrives at each."""
    left_full, left_empty, right_full, right_empty = halves
    rope_full, rope_empty = rope
    for s in gl.static_range(STAGES):
        mbarrier.init(left_full.index(s), count=1)
        mbarrier.init(rope_full.index(s), count=1)
        mbarrier.init(rope_empty.index(s), count=1)
        mbarrier.init(left_empty.index(s), count=1)
        mbarrier.init(right_full.index(s), count=1)
        mbarrier.init(right_empty.index(s), count=1)
