"""What a prompts' kernel allocates for its partitions: consumers, a producer and, over fp8 pages, warps that widen."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.hopper.barriers import make_barriers


@gluon.jit
def make_shared(
    q_desc, k_desc, v_desc,
    GQA_GROUP: gl.constexpr, DIM: gl.constexpr, D: gl.constexpr, PACKED: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr, SCALES: gl.constexpr, QUEUE: gl.constexpr,
):  # fmt: skip
    """Returns, with barriers initialised:

    rows        queries, keys and values as consumers read them
    arriving    the same as the copy engine writes them, then keys and values as the pages have them
    bars        barriers of queries, keys and values
    in_bars     barriers of keys and values as the pages have them; without SCALES those of `bars`
    queue       QUEUE words of the work that the producer drew
    """
    DTYPE: gl.constexpr = q_desc.dtype
    PAGE_DTYPE: gl.constexpr = k_desc.dtype
    rows: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    if PACKED:
        q_in = gl.allocate_shared_memory(DTYPE, [2, 64, D], q_desc.layout)
    else:
        q_in = gl.allocate_shared_memory(DTYPE, [2, 64 // GQA_GROUP, GQA_GROUP, D], q_desc.layout)
    qs = q_in if PACKED else q_in._reinterpret(DTYPE, [2, 64, D], rows)
    if DIM < D:
        k_in = gl.allocate_shared_memory(PAGE_DTYPE, [STAGES, BN, 1, D], k_desc.layout)
        v_in = gl.allocate_shared_memory(PAGE_DTYPE, [STAGES, BN, 1, D], v_desc.layout)
    else:
        k_in = gl.allocate_shared_memory(PAGE_DTYPE, [STAGES, BN, D], k_desc.layout)
        v_in = gl.allocate_shared_memory(PAGE_DTYPE, [STAGES, BN, D], v_desc.layout)
    tiles: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=128, element_bitwidth=PAGE_DTYPE.primitive_bitwidth, rank=2
    )
    ks = k_in._reinterpret(PAGE_DTYPE, [STAGES, BN, D], tiles)
    vs = v_in._reinterpret(PAGE_DTYPE, [STAGES, BN, D], tiles)
    k_quantized, v_quantized = ks, vs
    queue = gl.allocate_shared_memory(gl.int32, [QUEUE, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    # The queries are there when the copy engine says so, and with them the queue, by its writer.
    q_full = make_barriers(1, 2)
    q_empty = make_barriers(1, 3 if SCALES else 2)
    k_full = make_barriers(STAGES, 1)
    k_empty = make_barriers(STAGES, 2)
    v_full = make_barriers(STAGES, 1)
    v_empty = make_barriers(STAGES, 2)
    k_in_full = k_full
    k_in_empty = k_empty
    v_in_full = v_full
    v_in_empty = v_empty
    if SCALES:
        # fp16 holds every e4m3 value, and takes a fraction of the instructions that bf16 takes.
        ks = gl.allocate_shared_memory(gl.float16, [STAGES, BN, D], rows)
        vs = gl.allocate_shared_memory(gl.float16, [STAGES, BN, D], rows)
        k_in_full = make_barriers(STAGES, 1)
        k_in_empty = make_barriers(STAGES, 1)
        v_in_full = make_barriers(STAGES, 1)
        v_in_empty = make_barriers(STAGES, 1)
    return (
        (qs, ks, vs),
        (q_in, k_in, v_in, k_quantized, v_quantized),
        (q_full, q_empty, k_full, k_empty, v_full, v_empty),
        (k_in_full, k_in_empty, v_in_full, v_in_empty),
        queue,
    )
