"""mla_prefill in Triton: one program for one tile of a sequence's queries and one head.

As in the kernel for Hopper tiles of keys come in the same order, with the same kind of state before and after, so that
what a CPU's interpreter shows of cuts and masks holds for both.
"""

import torch
import triton
import triton.language as tl

from kernels import softmax
from kernels.addressing.triton import row_mask
from kernels.errors import KernelArgumentError
from kernels.mla_prefill.call import MlaPrefillCall
from kernels.softmax.triton import LN_2, MASKED, NO_KEYS

BLOCK_M = 64
BLOCK_N = 128  # cutting the keys at multiples of this changes no bit
# Of wider keys and values (elements of both, padded) half as many: 188 KB of shared memory for 256 + 64 + 256.
NARROW, WIDEST = 320, 576
LEAST_BLOCK = 16  # the least that a product's operand is wide


# What changes from batch to batch is not specialised on: a new value must not mean a new compilation.
@triton.jit(do_not_specialize=["num_tokens"])
def attend_tile(
    q_ptr,
    k_nope_ptr,
    k_rope_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    acc_ptr,
    row_max_ptr,
    row_sum_ptr,
    cu_q_ptr,
    cu_k_ptr,
    offsets_ptr,
    scale_log2,
    num_tokens,
    stride_q_token,
    stride_q_head,
    stride_nope_token,
    stride_nope_head,
    stride_rope_token,
    stride_rope_head,
    stride_v_token,
    stride_v_head,
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_NOPE: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    MODE: tl.constexpr,
    RESUMES: tl.constexpr,
    SUSPENDS: tl.constexpr,
    WANTS_LSE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # the longest rows first: the card's last wave is then a short one
    seq = tl.program_id(2)
    q_start = tl.load(cu_q_ptr + seq)
    q_len = tl.load(cu_q_ptr + seq + 1) - q_start
    if tile * BLOCK_M >= q_len:
        return
    k_start = tl.load(cu_k_ptr + seq)
    k_len = tl.load(cu_k_ptr + seq + 1) - k_start
    if MODE == 0:
        offset = k_len - q_len
    elif MODE == 1:
        offset = tl.load(offsets_ptr + seq)
    else:
        offset = k_len
    query = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    live = query < q_len
    nope = tl.arange(0, BLOCK_NOPE)
    rope = tl.arange(0, BLOCK_ROPE)
    value = tl.arange(0, BLOCK_VALUE)
    column = tl.arange(0, BLOCK_N)
    token = (q_start + query).to(tl.int64)
    q_at = (token * stride_q_token + head * stride_q_head)[:, None]
    q = tl.load(q_ptr + q_at + nope[None, :], mask=row_mask(live, NOPE, BLOCK_NOPE), other=0.0)
    q_rope = tl.load(q_ptr + q_at + NOPE + rope[None, :], mask=row_mask(live, ROPE, BLOCK_ROPE), other=0.0)
    stat_at = head.to(tl.int64) * num_tokens + token
    out_at = ((token * HEADS + head) * VALUE)[:, None] + value[None, :]
    out_ok = row_mask(live, VALUE, BLOCK_VALUE)
    # Above every masked score, so that the weight of one is 0 even in a row that has seen no key yet.
    row_max = tl.full([BLOCK_M], NO_KEYS, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_VALUE], tl.float32)
    if RESUMES:
        row_max = tl.load(row_max_ptr + stat_at, mask=live, other=NO_KEYS)
        row_sum = tl.load(row_sum_ptr + stat_at, mask=live, other=0.0)
        acc = tl.load(acc_ptr + out_at, mask=out_ok, other=0.0)
    last_seen = tl.minimum(offset + query, k_len - 1)
    end = tl.minimum(k_len, offset + tl.minimum(q_len, (tile + 1) * BLOCK_M))
    for start in tl.range(0, end, BLOCK_N):
        key = start + column
        ok = key < k_len
        row = (k_start + key).to(tl.int64)
        k = tl.load(
            k_nope_ptr + (row * stride_nope_token + head * stride_nope_head)[:, None] + nope[None, :],
            mask=row_mask(ok, NOPE, BLOCK_NOPE),
            other=0.0,
        )
        k_rope = tl.load(
            k_rope_ptr + (row * stride_rope_token + head * stride_rope_head)[:, None] + rope[None, :],
            mask=row_mask(ok, ROPE, BLOCK_ROPE),
            other=0.0,
        )
        v = tl.load(
            v_ptr + (row * stride_v_token + head * stride_v_head)[:, None] + value[None, :],
            mask=row_mask(ok, VALUE, BLOCK_VALUE),
            other=0.0,
        )
        scores = tl.dot(q_rope, tl.trans(k_rope), tl.dot(q, tl.trans(k)))
        scores = tl.where(key[None, :] <= last_seen[:, None], scores, MASKED)
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
        weights = tl.exp2(scores * scale_log2 - new_max[:, None])
        decay = tl.exp2(row_max - new_max)
        row_sum = row_sum * decay + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None])
        row_max = new_max
    if SUSPENDS:
        tl.store(acc_ptr + out_at, acc, mask=out_ok)
        tl.store(row_max_ptr + stat_at, row_max, mask=live)
        tl.store(row_sum_ptr + stat_at, row_sum, mask=live)
    else:
        out = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
        tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=out_ok)
        if WANTS_LSE:
            lse = tl.where(row_sum == 0.0, float("-inf"), (row_max + tl.log2(row_sum)) * LN_2)
            tl.store(lse_ptr + stat_at, lse, mask=live)


def check_dims(call: MlaPrefillCall) -> None:
    """Refuses heads whose tiles do not fit in shared memory."""
    if sum(_padded(call)) > WIDEST:
        raise KernelArgumentError(
            f"q, v: heads (nope, rope, value) of {call.dims} take {_padded(call)} elements, together more than {WIDEST}"
        )


def _padded(call: MlaPrefillCall) -> list[int]:
    """Columns of the tiles of nope, rope and value."""
    return [max(triton.next_power_of_2(dim), LEAST_BLOCK) for dim in call.dims]


def launch(call: MlaPrefillCall, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Launches over checked, non-empty arguments."""
    q, k_nope, k_rope, v = call.q, call.k_nope, call.k_rope, call.v
    tokens, heads, _ = q.shape
    (nope, rope, value), padded = call.dims, _padded(call)
    acc, row_max, row_sum = call.state if call.state is not None else (out, out, out)
    with torch.cuda.device_of(q):
        attend_tile[(heads, triton.cdiv(call.max_seqlen_q, BLOCK_M), call.num_seqs)](
            q,
            k_nope,
            k_rope,
            v,
            out,
            lse if lse is not None else out,
            acc,
            row_max,
            row_sum,
            call.cu_seqlens_q,
            call.cu_seqlens_k,
            call.offsets_or_any,
            call.scale * softmax.LOG2_E,
            tokens,
            q.stride(0),
            q.stride(1),
            k_nope.stride(0),
            k_nope.stride(1),
            k_rope.stride(0),
            call.rope_head_stride,
            v.stride(0),
            v.stride(1),
            HEADS=heads,
            NOPE=nope,
            ROPE=rope,
            VALUE=value,
            BLOCK_NOPE=padded[0],
            BLOCK_ROPE=padded[1],
            BLOCK_VALUE=padded[2],
            MODE=call.mask_mode,
            RESUMES=call.resumes,
            SUSPENDS=call.suspends,
            WANTS_LSE=lse is not None,
            BLOCK_M=BLOCK_M,
            BLOCK_N=BLOCK_N if sum(padded) <= NARROW else BLOCK_N // 2,
            num_warps=8,
            num_stages=2,
        )
