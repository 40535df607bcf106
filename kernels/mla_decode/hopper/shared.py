"""What a kernel for many heads allocates for its three partitions: two consumers, and a producer of latents."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kernels.mla_decode.hopper.runs_barriers import init_latent_barriers, latent_barriers


@gluon.jit
def make_shared(TILE: gl.constexpr, STAGES: gl.constexpr):
    """Returns three tuples, with barriers initialised:

    shared   queries and a ring of latents, both in halves and rotary part; what consumers hand each other
    bars     barriers of queries and halves, of rotary parts, and between the consumers
    work     a queue of items, with its barriers
    """
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    HANDED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * TILE, element_bitwidth=16, rank=2)
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    q_left = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 256], LAYOUT)
    q_right = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 256], LAYOUT)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 64], LAYOUT)
    left = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE, 256], LAYOUT)
    right = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE, 256], LAYOUT)
    rope = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE, 64], LAYOUT)
    handed = gl.allocate_shared_memory(gl.bfloat16, [64, TILE], HANDED)
    stats = gl.allocate_shared_memory(gl.float32, [3, 64], VECTOR)
    ends = gl.allocate_shared_memory(gl.float32, [2, 64], VECTOR)
    q_full = gl.allocate_shared_memory(gl.int64, [1], BAR)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], BAR)
    halves, rope_bars = latent_barriers(STAGES)
    even_done = gl.allocate_shared_memory(gl.int64, [1], BAR)
    odd_done = gl.allocate_shared_memory(gl.int64, [1], BAR)
    end_full = gl.allocate_shared_memory(gl.int64, [1], BAR)
    end_empty = gl.allocate_shared_memory(gl.int64, [1], BAR)
    queue = gl.allocate_shared_memory(gl.int32, [16, 1], VECTOR)
    queue_full = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    queue_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    for s in gl.static_range(2):
        mbarrier.init(queue_full.index(s), count=1)
        mbarrier.init(queue_empty.index(s), count=2)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=2)
    mbarrier.init(even_done, count=1)
    mbarrier.init(odd_done, count=1)
    mbarrier.init(end_full, count=1)
    mbarrier.init(end_empty, count=1)
    init_latent_barriers(halves, rope_bars, STAGES)
    bars = (
        (q_full, q_empty, halves[0], halves[1], halves[2], halves[3]),
        rope_bars,
        (even_done, odd_done, end_full, end_empty),
    )
    return ((q_left, q_right, q_rope, left, right, rope), (handed, stats, ends)), bars, (queue, queue_full, queue_empty)
