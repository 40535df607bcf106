"""index_logits in Gluon for Hopper, for few rows: a program for each block of keys of a row, many of them at once."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.hopper.barriers import thread_barrier
from kernels.hopper.launches import allow_next_launch, wait_for_last_launch


# What changes from batch to batch is not specialised on: a new value, or rows that begin elsewhere, must not mean a new
# compilation.
@gluon.jit(
    do_not_specialize=["max_keys", "least_keys", "stride_tables_seq"],
    do_not_specialize_on_alignment=["sequences_ptr", "num_keys_ptr"],
)
def score_blocks(
    q_ptr, pages_ptr, weights_ptr, scales_ptr, tables_ptr, sequences_ptr, num_keys_ptr, out_ptr, max_keys, least_keys,
    stride_q_token, stride_weights_token, stride_scales_page, stride_tables_seq, page_rows,
    HEADS: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr, KEYS: gl.constexpr, HAS_SCALES: gl.constexpr,
):  # fmt: skip
    """Programs [blocks of KEYS keys, rows]."""
    allow_next_launch()
    wait_for_last_launch()
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    BITS: gl.constexpr = DTYPE.primitive_bitwidth
    EACH: gl.constexpr = 128 // BITS  # elements of 16 bytes
    TILES: gl.constexpr = gl.NVMMASharedLayout(128, BITS, rank=2)
    L: gl.constexpr = gl.BlockedLayout([1, EACH], [32 * EACH // DIM, DIM // EACH], [4, 1], [1, 0])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HEADS, 256 // BITS]
    )
    token = gl.program_id(1)
    first = gl.program_id(0) * KEYS
    # Neither load waits for the other; a row that sees no key may be of no sequence.
    sequence = gl.maximum(gl.load(sequences_ptr + token), 0)
    count = gl.minimum(gl.load(num_keys_ptr + token), max_keys)
    table_ptr = tables_ptr + sequence.to(gl.int64) * stride_tables_seq
    row = gl.arange(0, KEYS, gl.SliceLayout(1, L))
    key = gl.arange(0, KEYS, gl.SliceLayout(1, SCORES))
    # Pages are read before it is known how many keys there are, as far as the table goes.
    pages = gl.load(table_ptr + gl.minimum(first + row, max_keys - 1) // PAGE)
    first_page = gl.load(table_ptr + first // PAGE)
    if (first < count) & (count > least_keys):
        keys = gl.allocate_shared_memory(DTYPE, [KEYS, DIM], TILES)
        query = gl.allocate_shared_memory(DTYPE, [HEADS, DIM], TILES)
        column = gl.arange(0, DIM, gl.SliceLayout(0, L))[None, :]
        # Behind the last key come rows of the first one's page, whose logits are not stored.
        at = gl.where(first + row < count, pages, first_page).to(gl.int64) * page_rows + (first + row) % PAGE
        async_copy.async_copy_global_to_shared(keys, pages_ptr + (at * DIM)[:, None] + column)
        head = gl.arange(0, HEADS, gl.SliceLayout(1, L)).to(gl.int64)
        q_ptr += token.to(gl.int64) * stride_q_token
        async_copy.async_copy_global_to_shared(query, q_ptr + (head * DIM)[:, None] + column)
        async_copy.commit_group()
        weights_ptr += token.to(gl.int64) * stride_weights_token
        weight = gl.load(weights_ptr + gl.arange(0, HEADS, gl.SliceLayout(0, SCORES)))
        if HAS_SCALES:
            own = gl.load(table_ptr + gl.minimum(first + key, count - 1) // PAGE)
            factor = gl.load(scales_ptr + own.to(gl.int64) * stride_scales_page + (first + key) % PAGE)
        async_copy.wait_group(0)
        thread_barrier()
        fence_async_shared()
        zeros = gl.zeros([KEYS, HEADS], gl.float32, SCORES)
        scores = warpgroup_mma(keys, query.permute((1, 0)), zeros, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        logits = gl.sum(gl.maximum(scores, 0.0) * weight[None, :], 1)
        if HAS_SCALES:
            logits = logits * factor
        gl.store(out_ptr + token.to(gl.int64) * max_keys + first + key, logits, mask=first + key < count)
