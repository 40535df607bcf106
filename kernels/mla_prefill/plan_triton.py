"""The plan of mla_prefill in Triton: every program ranks a few tiles of queries among all tiles.

Ranks are counted, not sorted: a batch has hundreds of tiles, not more.
"""

import torch
import triton
import triton.language as tl

COMPARED = 4096  # tiles times sequences that a program compares at a time


@triton.jit
def tile_keys(
    tile, starts, ends, seqs, total, cu_q_ptr, cu_k_ptr, offsets_ptr, MODE: tl.constexpr, BLOCK: tl.constexpr
):
    """(sequence, tile of it, keys that it sees) of tiles counted over the whole batch; -1 keys behind the last tile."""
    seq = tl.sum((ends[None, :] <= tile[:, None]).to(tl.int32), 1)
    own = tile - tl.sum(tl.where(seqs[None, :] == seq[:, None], starts[None, :], 0), 1)
    ok = tile < total
    q_len = tl.load(cu_q_ptr + seq + 1, mask=ok, other=0) - tl.load(cu_q_ptr + seq, mask=ok, other=0)
    k_len = tl.load(cu_k_ptr + seq + 1, mask=ok, other=0) - tl.load(cu_k_ptr + seq, mask=ok, other=0)
    if MODE == 0:
        offset = k_len - q_len
    elif MODE == 1:
        offset = tl.load(offsets_ptr + seq, mask=ok, other=0)
    else:
        offset = k_len
    keys = tl.minimum(k_len, offset + tl.minimum(q_len, (own + 1) * BLOCK))
    return seq, own, tl.where(ok, tl.maximum(keys, 0), -1)


@triton.jit(do_not_specialize=["num_seqs"])
def order_tiles(
    order_ptr,
    counts_ptr,
    cu_q_ptr,
    cu_k_ptr,
    offsets_ptr,
    num_seqs,
    MODE: tl.constexpr,
    BLOCK: tl.constexpr,
    SEQS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    seqs = tl.arange(0, SEQS)
    ok = seqs < num_seqs
    q_len = tl.load(cu_q_ptr + seqs + 1, mask=ok, other=0) - tl.load(cu_q_ptr + seqs, mask=ok, other=0)
    tiles = (q_len + BLOCK - 1) // BLOCK
    ends = tl.cumsum(tiles, 0)
    starts = ends - tiles
    total = tl.sum(tiles, 0)
    slot = tl.arange(0, SLOTS)
    tile = tl.program_id(0) * SLOTS + slot
    seq, own, keys = tile_keys(tile, starts, ends, seqs, total, cu_q_ptr, cu_k_ptr, offsets_ptr, MODE, BLOCK)
    rank = tl.zeros([SLOTS], tl.int32)
    for first in range(0, total, SLOTS):
        other = first + slot
        _, _, other_keys = tile_keys(other, starts, ends, seqs, total, cu_q_ptr, cu_k_ptr, offsets_ptr, MODE, BLOCK)
        ahead = (other_keys[None, :] > keys[:, None]) | (
            (other_keys[None, :] == keys[:, None]) & (other[None, :] < tile[:, None])
        )
        rank += tl.sum(ahead.to(tl.int32), 1)
    tl.store(order_ptr + rank * 2, seq, mask=tile < total)
    tl.store(order_ptr + rank * 2 + 1, own, mask=tile < total)
    if tl.program_id(0) == 0:
        tl.store(counts_ptr, total)


def launch(
    order: torch.Tensor,
    counts: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    q_offsets: torch.Tensor | None,
    causal: bool,
    max_tiles: int,
    block: int,
) -> None:
    """Launches over checked arguments. `block`: the tokens of a tile."""
    num_seqs = cu_seqlens_q.shape[0] - 1
    seqs = max(triton.next_power_of_2(num_seqs), 16)
    slots = max(min(COMPARED // seqs, 64), 16)
    with torch.cuda.device_of(order):
        order_tiles[(max(triton.cdiv(max_tiles, slots), 1),)](
            order,
            counts,
            cu_seqlens_q,
            cu_seqlens_k,
            q_offsets if q_offsets is not None else cu_seqlens_q,
            num_seqs,
            MODE=1 if q_offsets is not None else 0 if causal else 2,
            BLOCK=block,
            SEQS=seqs,
            SLOTS=slots,
            num_warps=8,
        )
