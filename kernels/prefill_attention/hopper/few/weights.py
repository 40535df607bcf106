"""Weights of a round, once all scorers have written the maxima of their scores."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.hopper.softmax import LEAD, any_in_warp, leads, new_bases, rebased, row_sums, thread_sums, weigh
from kernels.prefill_attention.hopper.few.scores import key_work, score_tile
from kernels.prefill_attention.hopper.few.tiles import KEYS, half_tile
from kernels.softmax.triton import MASKED, NO_KEYS

# Earlier tiles whose maxima are read at a time.
PEAKS_AT_ONCE = gl.constexpr(32)


@gluon.jit
def _earlier_bases(peaks_ptr, bases_ptr, place, turn, scale, RS: gl.constexpr, DTYPE: gl.constexpr):
    """Returns the rows' bases with all key tiles before the one at `place` of a round, whose peaks are there.

    Behind `bases_ptr` are those at the end of the last round, and at the end of the one before.
    """
    PEAKS: gl.constexpr = gl.BlockedLayout([PEAKS_AT_ONCE // 2, 1], [1, 32], [2, 2], [0, 1])
    row = gl.arange(0, 64, RS)
    base = gl.load(bases_ptr + (turn + 1) % 2 * 64 + row, mask=(row < 64) & (turn > 0), other=0.0, cache_modifier=".cg")
    if turn == 0:
        first = gl.load(peaks_ptr + row, mask=(row < 64) & (place > 0), other=NO_KEYS, cache_modifier=".cg")
        base = gl.maximum(first, NO_KEYS) * scale
    earlier = gl.arange(0, PEAKS_AT_ONCE, gl.SliceLayout(1, PEAKS))[:, None]
    column = gl.arange(0, 64, gl.SliceLayout(0, PEAKS))[None, :]
    top = gl.full([64], MASKED, gl.float32, RS)
    for first_place in range(0, place, PEAKS_AT_ONCE):
        at = first_place + earlier
        peaks = gl.load(
            peaks_ptr + at * 64 + column, mask=(at < place) & (column < 64), other=MASKED, cache_modifier=".cg"
        )
        top = gl.maximum(top, gl.convert_layout(gl.max(peaks, 0), RS))
    lead = gl.fma(top, gl.zeros_like(top) + scale, -base)
    # Nearly never: bases that moved are found one tile after the other.
    if any_in_warp(lead, LEAD):
        for i in range(place):
            peak = gl.load(peaks_ptr + i * 64 + row, cache_modifier=".cg")
            lead = gl.fma(peak, gl.zeros_like(peak) + scale, -base)
            base, _steps, _far = new_bases(peak, lead, base, scale, DTYPE)
    return base


@gluon.jit
def write_weights(scratch, bases_ptr, scores, slot, place, tile, turn, is_last, scale, SL: gl.constexpr):
    """Writes a tile's weights, sums, and factors of earlier sums; `slot` is the tile's, `place` that in its round."""
    peaks_ptr, decays_ptr, sums_ptr, weights_ptr = scratch
    DTYPE: gl.constexpr = weights_ptr.dtype.element_ty
    RS: gl.constexpr = gl.SliceLayout(1, SL)
    # Neighbouring threads write neighbouring keys: as the product has them a store is of 16 bytes of each of 8 rows.
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    row = gl.arange(0, 64, RS)
    base = _earlier_bases(peaks_ptr + (slot - place) * 64, bases_ptr, place, turn, scale, RS, DTYPE)
    weights = weigh(scores, base, scale)
    p, sums, decay = weights.to(DTYPE), thread_sums(weights), gl.full([64], 1.0, gl.float32, RS)
    top, lead = leads(scores, base, scale)
    if any_in_warp(lead, LEAD):
        p, sums, base, decay = rebased(scores, top, lead, p, sums, base, scale)
    out_row = gl.arange(0, 64, gl.SliceLayout(1, STORE))[:, None]
    key = gl.arange(0, KEYS, gl.SliceLayout(0, STORE))[None, :]
    gl.store(weights_ptr + slot.to(gl.int64) * (64 * KEYS) + out_row * KEYS + key, gl.convert_layout(p, STORE))
    gl.store(decays_ptr + slot * 64 + row, gl.where(tile == 0, 1.0, decay))
    gl.store(sums_ptr + slot * 64 + row, row_sums(sums, base))
    if is_last:
        gl.store(bases_ptr + turn % 2 * 64 + row, base)


@gluon.jit
def weigh_round(
    sources, scratch, bases_ptr, buffers, last, scores, scorers, tiles, begin, width, turn, scale_log2, cap_log2,
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
                scratch, bases_ptr + rows * 128, scores, rows * width + place, place, begin + place, turn, is_last,
                scale_log2, SL,
            )  # fmt: skip
        work -= scorers
