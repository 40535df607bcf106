"""Offsets of elements inside one page, by layout, and sequences of dense rows: jit functions that ops' kernels call.

The caller adds page_id * stride_page in 64 bits. A page is small, so 32 bits do here.
"""

import triton
import triton.language as tl

from kernels.addressing import PROBES

_PROBES = tl.constexpr(PROBES)


@triton.jit
def page_offset(
    slot,
    head,
    d,
    KEYS: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    X: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """Returns where element d of a key (KEYS) or of a value lies; slot, head and d broadcast against each other."""
    if LAYOUT == 0:
        offset = (slot * HEADS + head) * D + d
    elif LAYOUT == 1:
        offset = (head * PAGE + slot) * D + d
    elif KEYS:
        offset = ((head * (D // X) + d // X) * PAGE + slot) * X + d % X
    else:
        offset = ((head * (PAGE // X) + slot // X) * D + d) * X + slot % X
    return offset


@triton.jit
def load_keys_values(
    k_pages_ptr,
    v_pages_ptr,
    page,
    slot,
    head,
    d,
    ok,
    stride_k_page,
    stride_v_page,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    X: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """Returns one head's keys [dims, n] and values [n, dims] of slots [n] in pages [n], zeros where not ok."""
    k_at = (page * stride_k_page)[None, :] + page_offset(
        slot[None, :], head, d[:, None], True, HEADS, D, PAGE, X, LAYOUT
    )
    v_at = (page * stride_v_page)[:, None] + page_offset(
        slot[:, None], head, d[None, :], False, HEADS, D, PAGE, X, LAYOUT
    )
    k = tl.load(k_pages_ptr + k_at, mask=ok[None, :] & (d < D)[:, None], other=0.0)
    v = tl.load(v_pages_ptr + v_at, mask=ok[:, None] & (d < D)[None, :], other=0.0)
    return k, v


@triton.jit
def narrowed(seq, begin, row, cu_k_ptr, num_seqs, STRIDE: tl.constexpr):
    """`seq` moved on over as many of the next PROBES strides as still start at or before each row, and its start."""
    probe = seq[:, None] + (tl.arange(0, _PROBES)[None, :] + 1) * STRIDE
    start = tl.load(cu_k_ptr + probe, mask=probe < num_seqs, other=2147483647)
    reached = start <= row[:, None]
    begin = tl.maximum(begin, tl.max(tl.where(reached, start, 0), 1))
    return seq + tl.sum(reached.to(tl.int32), 1) * STRIDE, begin


@triton.jit
def sequence_of(row, cu_k_ptr, num_seqs, LEVELS: tl.constexpr):
    """The last sequence that starts at or before each row, and its start; empty ones start there too and are passed.

    PROBES starts at a time: two dependent loads, rather than ten, find one of a thousand sequences. The start is among
    the probed, so it is not loaded once more.
    """
    seq = tl.zeros_like(row)
    begin = tl.zeros_like(row)
    for level in tl.static_range(LEVELS):
        seq, begin = narrowed(seq, begin, row, cu_k_ptr, num_seqs, _PROBES ** (LEVELS - 1 - level))
    return seq, begin


@triton.jit
def row_mask(ok, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Which of [n, BLOCK] elements belong to rows [n] of SIZE elements that are ok; [n, 1] where all of a row do."""
    mask = ok[:, None]
    if BLOCK > SIZE:
        mask = mask & (tl.arange(0, BLOCK) < SIZE)[None, :]
    return mask


@triton.jit
def query_span(cu_q_ptr, seqlens_ptr, seq, HAS_SPANS: tl.constexpr):
    """Returns (first row of q, tokens, keys) of a sequence; without spans each has one token."""
    length = tl.load(seqlens_ptr + seq)
    start = seq
    tokens = length * 0 + 1
    if HAS_SPANS:
        start = tl.load(cu_q_ptr + seq).to(tl.int64)
        tokens = tl.load(cu_q_ptr + seq + 1) - start.to(tl.int32)
    return start, tokens, length
