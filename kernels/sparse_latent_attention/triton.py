"""sparse_latent_attention in Triton: one program for one query and a tile of its heads.

Chosen latents are gathered BLOCK_N at a time, in the order given, and one softmax is carried over all of them.
"""

import torch
import triton
import triton.language as tl

from kernels import softmax
from kernels.addressing.triton import row_mask
from kernels.softmax.triton import MASKED, NO_KEYS
from kernels.sparse_latent_attention.call import SparseLatentCall

LEAST_BLOCK = 16  # the least that a product's operand is wide
# Heads of a program: with more, its sums no longer fit in registers.
MOST_HEADS = 64
BLOCK_N = 64
WARPS = 8
# A position leads to its page and that to the latent: one of each is loaded ahead.
STAGES = 4


# What changes from batch to batch is not specialised on: a new value must not mean a new compilation.
@triton.jit(do_not_specialize=["stride_tables_seq"])
def attend_chosen(
    q_ptr,
    pages_ptr,
    tables_ptr,
    sequences_ptr,
    num_keys_ptr,
    chosen_ptr,
    out_ptr,
    scale_log2,
    stride_page,
    stride_tables_seq,
    K: tl.constexpr,
    HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_LATENT: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    STAGES: tl.constexpr,
):
    WIDTH: tl.constexpr = LATENT + ROPE
    TILES: tl.constexpr = (HEADS + ROWS - 1) // ROWS
    # A query's tiles are neighbours in launch order: they gather the same latents.
    head = tl.program_id(0) % TILES * ROWS + tl.arange(0, ROWS)
    live = head < HEADS
    token = (tl.program_id(0) // TILES).to(tl.int64)
    count = tl.minimum(tl.load(num_keys_ptr + token), K)
    # A row that sees no key may be of no sequence.
    table_ptr = tables_ptr + tl.maximum(tl.load(sequences_ptr + token), 0).to(tl.int64) * stride_tables_seq
    d = tl.arange(0, BLOCK_LATENT)
    r = LATENT + tl.arange(0, BLOCK_ROPE)
    column = tl.arange(0, BLOCK_N)
    q_at = (token * HEADS + head) * WIDTH
    q = tl.load(q_ptr + q_at[:, None] + d[None, :], mask=row_mask(live, LATENT, BLOCK_LATENT), other=0.0)
    q_rope = tl.load(q_ptr + q_at[:, None] + r[None, :], mask=row_mask(live, ROPE, BLOCK_ROPE), other=0.0)
    row_max = tl.full([ROWS], NO_KEYS, tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_LATENT], tl.float32)
    for start in tl.range(0, count, BLOCK_N, num_stages=STAGES):
        ok = start + column < count
        position = tl.load(chosen_ptr + token * K + start + column, mask=ok, other=0)
        page = tl.load(table_ptr + position // PAGE, mask=ok, other=0).to(tl.int64)
        at = page * stride_page + (position % PAGE) * WIDTH
        latent = tl.load(pages_ptr + at[:, None] + d[None, :], mask=row_mask(ok, LATENT, BLOCK_LATENT), other=0.0)
        rope = tl.load(pages_ptr + at[:, None] + r[None, :], mask=row_mask(ok, ROPE, BLOCK_ROPE), other=0.0)
        scores = tl.dot(q, tl.trans(latent)) + tl.dot(q_rope, tl.trans(rope))
        scores = tl.where(ok[None, :], scores, MASKED)
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
        weights = tl.exp2(scores * scale_log2 - new_max[:, None])
        decay = tl.exp2(row_max - new_max)
        row_sum = row_sum * decay + tl.sum(weights, 1)
        acc = tl.dot(weights.to(latent.dtype), latent, acc * decay[:, None])
        row_max = new_max
    share = 1.0 / tl.where(row_sum == 0.0, 1.0, row_sum)
    out_at = (token * HEADS + head) * LATENT
    out = (acc * share[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_at[:, None] + d[None, :], out, mask=row_mask(live, LATENT, BLOCK_LATENT))


def launch(call: SparseLatentCall, out: torch.Tensor) -> None:
    """Launches over checked, non-empty arguments."""
    q, pages = call.q, call.pages
    (tokens, heads, _), latent = q.shape, call.latent
    rope = pages.shape[2] - latent
    rows = min(max(triton.next_power_of_2(heads), LEAST_BLOCK), MOST_HEADS)
    with torch.cuda.device_of(q):
        attend_chosen[(triton.cdiv(heads, rows) * tokens,)](
            q,
            pages,
            call.block_tables,
            call.rows.sequences,
            call.rows.num_keys,
            call.chosen,
            out,
            call.scale * softmax.LOG2_E,
            pages.stride(0),
            call.block_tables.stride(0),
            K=call.chosen.shape[1],
            HEADS=heads,
            PAGE=pages.shape[1],
            ROWS=rows,
            BLOCK_N=BLOCK_N,
            LATENT=latent,
            ROPE=rope,
            BLOCK_LATENT=max(triton.next_power_of_2(latent), LEAST_BLOCK),
            BLOCK_ROPE=max(triton.next_power_of_2(rope), LEAST_BLOCK),
            STAGES=STAGES,
            num_warps=WARPS,
        )
