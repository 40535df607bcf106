"""decode_attention in Gluon for sm_90: persistent programs stream pages by TMA and sum along a fixed tree.

The arithmetic is a tree over a sequence's own key positions; which program computes which part, and whether a part
waits in memory or in registers, changes no bit:

    tiles of 64 keys -> leaves of 512, each a fresh softmax state -> groups of 4 leaves -> the sequence
                        folded in fp32, in ascending order, by one formula at every level

Keys are the rows of both products and query heads their columns (K Q' and V' P'): the few heads that share a kv head
then cost a few columns instead of a padded tile of 64 rows, and three levels of the tree fit in registers. Where there
are more columns, the upper levels' accumulators wait in shared memory between folds.

Quantized keys and values become fp16 in registers, on their way into the products (quantized.py); the tree is the same.

Three partitions of a program: one warp streams K, one streams V, four compute. A pair (sequence, kv head) that is one
split is finished in registers. One that is cut into several leaves partials in memory: of what a split holds of a group
from its beginning, and of each leaf behind a cut within a group; the program that arrives last merges them. Counters
return to zero, so that a captured graph can replay.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.decode_attention.hopper.attend import attend
from kernels.decode_attention.hopper.places import claim_place
from kernels.decode_attention.hopper.stream import stream_pages
from kernels.hopper.barriers import make_barriers
from kernels.hopper.launches import allow_next_launch, wait_for_last_launch


@gluon.jit(do_not_specialize=["num_tokens", "token_first", "stride_tables_seq"])
def decode_pages(
    k_desc,
    v_desc,
    k_page_rows,
    v_page_rows,
    q_ptr,
    stride_q_token,
    stride_q_head,
    out_ptr,
    stride_out_token,
    stride_out_head,
    lse_ptr,
    num_tokens,
    sinks_ptr,
    k_scale_ptr,
    v_scale_ptr,
    acc_ptr,
    row_max_ptr,
    row_sum_ptr,
    splits_ptr,
    arrivals_ptr,
    work_ptr,
    cu_seqlens_ptr,
    tables_ptr,
    stride_tables_seq,
    token_first,
    scale,
    cap,
    HEADS: gl.constexpr,
    GQA_GROUP: gl.constexpr,
    TOKENS: gl.constexpr,
    HAS_SPANS: gl.constexpr,
    COLUMNS: gl.constexpr,
    ROWS: gl.constexpr,
    D: gl.constexpr,
    PAGE: gl.constexpr,
    BY_HEAD: gl.constexpr,
    TILE: gl.constexpr,
    LEAF: gl.constexpr,
    LEAVES_PER_GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    PARKED: gl.constexpr,
    WINDOW: gl.constexpr,
    PLANNED: gl.constexpr,
    SOFTCAP: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    HAS_SCALES: gl.constexpr,
    WANTS_LSE: gl.constexpr,
    PLACED: gl.constexpr,
):
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    QUANTIZED: gl.constexpr = k_desc.dtype != dtype
    # fp16 holds every e4m3 value.
    operand: gl.constexpr = gl.float16 if QUANTIZED else dtype
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([COLUMNS, D], operand)
    p_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, COLUMNS], operand)
    q_smem = gl.allocate_shared_memory(operand, [1, COLUMNS, D], q_layout)
    p_smem = gl.allocate_shared_memory(operand, [TILE, COLUMNS], p_layout)
    k_ring = gl.allocate_shared_memory(k_desc.dtype, [STAGES, TILE, D], k_desc.layout)
    v_ring = gl.allocate_shared_memory(v_desc.dtype, [STAGES, TILE, D], v_desc.layout)
    parked = p_smem
    if PARKED > 0:
        # Eight columns are what a product's registers hold of a row: so swizzled, a warp's rows lie in different banks.
        parked_layout: gl.constexpr = gl.SwizzledSharedLayout(8, 32 // COLUMNS, COLUMNS // 8, [1, 0])
        parked = gl.allocate_shared_memory(gl.float32, [PARKED, D, COLUMNS], parked_layout)
    k_full = make_barriers(STAGES, 1)
    k_empty = make_barriers(STAGES, 1)
    v_full = make_barriers(STAGES, 1)
    v_empty = make_barriers(STAGES, 1)
    queue = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    queue_full = make_barriers(2, 1)
    queue_empty = make_barriers(2, 2)
    allow_next_launch()
    wait_for_last_launch()
    place = claim_place(work_ptr) if PLACED else gl.program_id(0)
    value_scale = 1.0
    if HAS_SCALES:
        scale = scale * gl.load(k_scale_ptr)
        value_scale = gl.load(v_scale_ptr)
    rings = (q_smem, p_smem, k_ring, v_ring)
    barriers = (k_full, k_empty, v_full, v_empty)
    outputs = (out_ptr, lse_ptr, sinks_ptr)
    strides_out = (stride_out_token, stride_out_head, num_tokens)
    partials = (acc_ptr, row_max_ptr, row_sum_ptr)
    factors = (scale, cap, value_scale)
    gl.warp_specialize(
        [
            (
                attend,
                (
                    q_ptr, (stride_q_token, stride_q_head), outputs, strides_out, partials, splits_ptr, arrivals_ptr,
                    cu_seqlens_ptr, token_first, factors, rings, barriers, queue, queue_full, queue_empty, parked,
                    place, HEADS, GQA_GROUP, TOKENS, HAS_SPANS, ROWS, LEAF, LEAVES_PER_GROUP, PARKED, WINDOW, PLANNED,
                    SOFTCAP, HAS_SINKS, WANTS_LSE, PLACED,
                ),
            ),
            (
                stream_pages,
                (
                    k_desc, k_page_rows, k_ring, k_full, k_empty, queue, queue_full, queue_empty, tables_ptr,
                    stride_tables_seq, cu_seqlens_ptr, token_first, splits_ptr, work_ptr, place, PAGE, TILE, LEAF,
                    TOKENS, HAS_SPANS, WINDOW, BY_HEAD, PLACED, True,
                ),
            ),
            (
                stream_pages,
                (
                    v_desc, v_page_rows, v_ring, v_full, v_empty, queue, queue_full, queue_empty, tables_ptr,
                    stride_tables_seq, cu_seqlens_ptr, token_first, splits_ptr, work_ptr, place, PAGE, TILE, LEAF,
                    TOKENS, HAS_SPANS, WINDOW, BY_HEAD, PLACED, False,
                ),
            ),
        ],
        [1, 1],
        # Boxes of wider rows take more addresses.
        [56, 56] if D > 128 else [40, 40],
    )  # fmt: skip
