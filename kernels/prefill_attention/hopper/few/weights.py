"""Weights of a round, once all scorers have written the maxima of their scores."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.prefill_attention.hopper.few.scores import key_work, score_tile
from kernels.prefill_attention.hopper.few.tiles import KEYS, half_tile
from kernels.prefill_attention.hopper.weights import weigh
from kernels.softmax.triton import NO_KEYS

# Earlier tiles whose maxima are read at a time.
PEAKS_AT_ONCE = gl.constexpr(32)


@gluon.jit
def write_weights(scratch, tops_ptr, scores, slot, place, tile, turn, is_last, scale, SL: gl.constexpr):
    """Writes a tile's weights, their sums and the factors of earlier sums; `slot` is the tile's, `place` in its round.

    Behind `tops_ptr` are the rows' maxima so far at the end of the last round, and at the end of the one before.
    """
    peaks_ptr, decays_ptr, sums_ptr, weights_ptr = scratch
    RS: gl.constexpr = gl.SliceLayout(1, SL)
    PEAKS: gl.constexpr = gl.BlockedLayout([PEAKS_AT_ONCE // 2, 1], [1, 32], [2, 2], [0, 1])
    # Neighbouring threads write neighbouring keys: as the product has them a store is of 16 bytes of each of 8 rows.
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    row = gl.arange(0, 64, RS)
    row_max = gl.load(
        tops_ptr + (turn + 1) % 2 * 64 + row, mask=(row < 64) & (turn > 0), other=NO_KEYS, cache_modifier=".cg"
    )
    earlier = gl.arange(0, PEAKS_AT_ONCE, gl.SliceLayout(1, PEAKS))[:, None]
    column = gl.arange(0, 64, gl.SliceLayout(0, PEAKS))[None, :]
    for first in range(0, place, PEAKS_AT_ONCE):
        peaks = gl.load(
            peaks_ptr + (slot - place + first + earlier) * 64 + column,
            mask=(first + earlier < place) & (column < 64), other=NO_KEYS, cache_modifier=".cg",
        )  # fmt: skip
        row_max = gl.maximum(row_max, gl.convert_layout(gl.max(peaks, 0), RS))
    new_max, _, weights, decay = weigh(scores, row_max, row_max * scale, scale, False)
    out_row = gl.arange(0, 64, gl.SliceLayout(1, STORE))[:, None]
    key = gl.arange(0, KEYS, gl.SliceLayout(0, STORE))[None, :]
    narrow = gl.convert_layout(weights.to(weights_ptr.dtype.element_ty), STORE)
    gl.store(weights_ptr + slot.to(gl.int64) * (64 * KEYS) + out_row * KEYS + key, narrow)
    gl.store(decays_ptr + slot * 64 + row, gl.where(tile == 0, 1.0, decay))
    gl.store(sums_ptr + slot * 64 + row, gl.sum(weights, 1))
    if is_last:
        gl.store(tops_ptr + turn % 2 * 64 + row, new_max)


@gluon.jit
def weigh_round(
    sources, scratch, tops_ptr, buffers, last, scores, scorers, tiles, begin, width, turn, scale_log2, cap_log2,
    HEADS: gl.constexpr, GQA_GROUP: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, HND: gl.constexpr,
    CAP: gl.constexpr, SL: gl.constexpr,
):  # fmt: skip
    """Writes the weights of a round. Of the last work the scores are still there, the others are made again."""
    queries, k_pages, v_pages, tables_ptr, stride_tables_seq, records_ptr = sources
    work = last
    while work >= 0:
        head, number, half, place, rows = key_work(work, tiles, width, HEADS)
        seq, first, token, q_len, kv_len, stop = half_tile(records_ptr, number, half, GQA_GROUP)
        if begin + place < stop:
            if work != last:
                table_ptr = tables_ptr + seq.to(gl.int64) * stride_tables_seq
                scores = score_tile(
                    buffers, queries, k_pages, v_pages, table_ptr, head, first, token, q_len, kv_len, begin + place,
                    cap_log2, HEADS, GQA_GROUP, D, PAGE, HND, CAP, False, SL,
                )  # fmt: skip
            is_last = (place == width - 1) | (begin + place == stop - 1)
            write_weights(
                scratch, tops_ptr + rows * 128, scores, rows * width + place, place, begin + place, turn, is_last,
                scale_log2, SL,
            )  # fmt: skip
        work -= scorers
