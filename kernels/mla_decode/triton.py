"""mla_decode in Triton: one program for one leaf of a sequence's latents and a tile of its rows, then one to fold them.

Leaves are LEAF latents long, start at absolute multiples of LEAF and are folded in ascending order, LEAVES_PER_GROUP of
them and then the groups, so a row's sum depends neither on which program computes which part nor on other requests.

    latents    0 .... LEAF .... 2 LEAF .... 3 LEAF .... length
    partials   |   0    |   1     |    2      |    3      |       acc, row_max, row_sum of each (or of each group)
    groups     |      0           |           1           |       where a group has 2 leaves
"""

import torch
import triton
import triton.language as tl

from kernels import softmax
from kernels.addressing.triton import row_mask
from kernels.mla_decode.call import MlaDecodeCall
from kernels.mla_decode.tree_sizes import tree_of
from kernels.softmax.triton import LN_2, MASKED, NO_KEYS

LEAST_BLOCK = 16  # the least that a product's operand is wide


# What changes from batch to batch is not specialised on: a new value must not mean a new compilation.
@triton.jit(do_not_specialize=["stride_tables_seq", "max_leaves"])
def attend_leaf(
    q_ptr,
    pages_ptr,
    acc_ptr,
    row_max_ptr,
    row_sum_ptr,
    tables_ptr,
    lengths_ptr,
    cu_q_ptr,
    scale_log2,
    max_leaves,
    stride_page,
    stride_tables_seq,
    HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    LEAF: tl.constexpr,
    MULTI: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_LATENT: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
):
    WIDTH: tl.constexpr = LATENT + ROPE
    tile = tl.program_id(0)
    leaf = tl.program_id(1)
    seq = tl.program_id(2).to(tl.int64)
    length = tl.load(lengths_ptr + seq)
    q_start = seq
    q_len = 1
    if MULTI:
        q_start = tl.load(cu_q_ptr + seq).to(tl.int64)
        q_len = tl.load(cu_q_ptr + seq + 1) - q_start.to(tl.int32)
    if (leaf * LEAF >= length) | (tile * ROWS >= q_len * HEADS):
        return
    row = tile * ROWS + tl.arange(0, ROWS)
    live = row < q_len * HEADS
    d = tl.arange(0, BLOCK_LATENT)
    r = LATENT + tl.arange(0, BLOCK_ROPE)
    column = tl.arange(0, BLOCK_N)
    last_seen = length - q_len + tl.minimum(row // HEADS, q_len - 1)
    q_at = (q_start * HEADS + row) * WIDTH
    q = tl.load(q_ptr + q_at[:, None] + d[None, :], mask=row_mask(live, LATENT, BLOCK_LATENT), other=0.0)
    q_rope = tl.load(q_ptr + q_at[:, None] + r[None, :], mask=row_mask(live, ROPE, BLOCK_ROPE), other=0.0)
    table_ptr = tables_ptr + seq * stride_tables_seq
    # Above every masked score, so that the weight of one is 0 even in a row that has seen no key yet.
    row_max = tl.full([ROWS], NO_KEYS, tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_LATENT], tl.float32)
    for start in tl.range(leaf * LEAF, tl.minimum(length, (leaf + 1) * LEAF), BLOCK_N):
        key = start + column
        ok = key < length
        page = tl.load(table_ptr + key // PAGE, mask=ok, other=0).to(tl.int64)
        at = page * stride_page + (key % PAGE) * WIDTH
        latent = tl.load(pages_ptr + at[:, None] + d[None, :], mask=row_mask(ok, LATENT, BLOCK_LATENT), other=0.0)
        rope = tl.load(pages_ptr + at[:, None] + r[None, :], mask=row_mask(ok, ROPE, BLOCK_ROPE), other=0.0)
        scores = tl.dot(q, tl.trans(latent)) + tl.dot(q_rope, tl.trans(rope))
        scores = tl.where(key[None, :] <= last_seen[:, None], scores, MASKED)
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
        weights = tl.exp2(scores * scale_log2 - new_max[:, None])
        decay = tl.exp2(row_max - new_max)
        row_sum = row_sum * decay + tl.sum(weights, 1)
        acc = tl.dot(weights.to(latent.dtype), latent, acc * decay[:, None])
        row_max = new_max
    first = ((seq * TILES + tile) * max_leaves + leaf) * ROWS
    slot = first + tl.arange(0, ROWS)
    at = (d // 8 * (ROWS * 8) + d % 8)[None, :] + (tl.arange(0, ROWS) * 8)[:, None]
    tl.store(acc_ptr + first * BLOCK_LATENT + at, acc, mask=live[:, None])
    tl.store(row_max_ptr + slot, row_max, mask=live)
    tl.store(row_sum_ptr + slot, row_sum, mask=live)


@triton.jit
def folded(acc, row_max, row_sum, part_acc, part_max, part_sum):
    """Returns the softmax state of a sum and one more part."""
    new_max = tl.maximum(row_max, part_max)
    keep = tl.exp2(row_max - new_max)
    weight = tl.exp2(part_max - new_max)
    return tl.fma(acc, tl.zeros_like(acc) + keep, part_acc * weight), new_max, tl.fma(row_sum, keep, part_sum * weight)


@triton.jit
def joined(acc, row_max, row_sum, partials, slot, at, row, ROWS: tl.constexpr, BLOCK_LATENT: tl.constexpr):
    """Returns the softmax state of a sum and a slot's partial result."""
    acc_ptr, row_max_ptr, row_sum_ptr = partials
    part_acc = tl.load(acc_ptr + slot * (ROWS * BLOCK_LATENT) + at)
    part_max = tl.load(row_max_ptr + slot * ROWS + row)
    return folded(acc, row_max, row_sum, part_acc, part_max, tl.load(row_sum_ptr + slot * ROWS + row))


@triton.jit(do_not_specialize=["num_tokens", "max_leaves"])
def fold_leaves(
    out_ptr,
    lse_ptr,
    acc_ptr,
    row_max_ptr,
    row_sum_ptr,
    lengths_ptr,
    cu_q_ptr,
    num_tokens,
    max_leaves,
    HEADS: tl.constexpr,
    LEAF: tl.constexpr,
    LEAVES_PER_GROUP: tl.constexpr,
    MULTI: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    LATENT: tl.constexpr,
    BLOCK_LATENT: tl.constexpr,
    WANTS_LSE: tl.constexpr,
):
    row = tl.program_id(0)
    seq = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths_ptr + seq)
    q_start = seq
    q_len = 1
    if MULTI:
        q_start = tl.load(cu_q_ptr + seq).to(tl.int64)
        q_len = tl.load(cu_q_ptr + seq + 1) - q_start.to(tl.int32)
    if row >= q_len * HEADS:
        return
    parts = tl.cdiv(length, LEAF)
    tile = row // ROWS
    first = (seq * TILES + tile) * max_leaves
    d = tl.arange(0, BLOCK_LATENT)
    at = d // 8 * (ROWS * 8) + d % 8 + row % ROWS * 8
    row_max = tl.full([], NO_KEYS, tl.float32)
    row_sum = 0.0
    acc = tl.zeros([BLOCK_LATENT], tl.float32)
    partials = (acc_ptr, row_max_ptr, row_sum_ptr)
    if LEAVES_PER_GROUP == 1:
        for part in tl.range(0, parts):
            acc, row_max, row_sum = joined(
                acc, row_max, row_sum, partials, first + part, at, row % ROWS, ROWS, BLOCK_LATENT
            )
    else:
        for start in tl.range(0, parts, LEAVES_PER_GROUP):
            group_acc, group_max, group_sum = (
                tl.zeros([BLOCK_LATENT], tl.float32),
                tl.full([], NO_KEYS, tl.float32),
                0.0,
            )
            for part in tl.range(start, tl.minimum(start + LEAVES_PER_GROUP, parts)):
                group_acc, group_max, group_sum = joined(
                    group_acc, group_max, group_sum, partials, first + part, at, row % ROWS, ROWS, BLOCK_LATENT
                )
            acc, row_max, row_sum = folded(acc, row_max, row_sum, group_acc, group_max, group_sum)
    share = 1.0 / tl.where(row_sum == 0.0, 1.0, row_sum)
    out_at = out_ptr + (q_start * HEADS + row) * LATENT + d
    out = (acc * share).to(out_ptr.dtype.element_ty)
    if BLOCK_LATENT > LATENT:
        tl.store(out_at, out, mask=d < LATENT)
    else:
        tl.store(out_at, out)
    if WANTS_LSE:
        lse = tl.where(row_sum == 0.0, float("-inf"), (row_max + tl.log2(row_sum)) * LN_2)
        tl.store(lse_ptr + (row % HEADS).to(tl.int64) * num_tokens + q_start + row // HEADS, lse)


def launch(call: MlaDecodeCall, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Launches over checked, non-empty arguments."""
    q, pages, block_tables = call.q, call.pages, call.block_tables
    (tokens, heads, _), num_seqs, multi = q.shape, call.num_seqs, call.cu_seqlens_q is not None
    latent, rope, rows = call.latent, pages.shape[2] - call.latent, 16
    block_latent = max(triton.next_power_of_2(latent), LEAST_BLOCK)
    tiles, tree = triton.cdiv(heads * call.max_q_tokens, rows), tree_of(heads, not multi)
    leaf = tree.short or tree.leaf
    leaves = max(triton.cdiv(call.max_seqlen_k, leaf), 1)
    slots = num_seqs * tiles * leaves
    acc = torch.empty((slots, rows, block_latent), dtype=torch.float32, device=q.device)
    row_max, row_sum = (torch.empty((slots, rows), dtype=torch.float32, device=q.device) for _ in range(2))
    with torch.cuda.device_of(q):
        attend_leaf[(tiles, leaves, num_seqs)](
            q,
            pages,
            acc,
            row_max,
            row_sum,
            block_tables,
            call.seqlens_k,
            call.spans_or_any,
            call.scale * softmax.LOG2_E,
            leaves,
            pages.stride(0),
            block_tables.stride(0),
            HEADS=heads,
            PAGE=pages.shape[1],
            LEAF=leaf,
            MULTI=multi,
            TILES=tiles,
            ROWS=rows,
            BLOCK_N=32,
            LATENT=latent,
            ROPE=rope,
            BLOCK_LATENT=block_latent,
            BLOCK_ROPE=max(triton.next_power_of_2(rope), LEAST_BLOCK),
            num_warps=8,
        )
        fold_leaves[(heads * call.max_q_tokens, num_seqs)](
            out,
            lse if lse is not None else row_max,
            acc,
            row_max,
            row_sum,
            call.seqlens_k,
            call.spans_or_any,
            tokens,
            leaves,
            HEADS=heads,
            LEAF=leaf,
            LEAVES_PER_GROUP=tree.leaves_per_group,
            MULTI=multi,
            TILES=tiles,
            ROWS=rows,
            LATENT=latent,
            BLOCK_LATENT=block_latent,
            WANTS_LSE=lse is not None,
            num_warps=4,
        )
