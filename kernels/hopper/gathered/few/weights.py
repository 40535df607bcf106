"""Weights of a launch of few rows: one program for a tile of 64 keys and 64 heads of a query."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.hopper.gathered.few.tiles import heads_and_keys, tile_slot
from kernels.hopper.launches import allow_next_launch, wait_for_last_launch
from kernels.softmax.triton import NO_KEYS


@gluon.jit
def weigh_tile(
    keys, scratch, scale_log2, key_tiles, COUNT: gl.constexpr, PIECE: gl.constexpr, HEADS: gl.constexpr,
):  # fmt: skip
    """Writes weights [64, 64] and for each head their sum, the largest score so far, scaled, and the factor that what
    earlier tiles of the piece have added up gets."""
    allow_next_launch()
    scores_ptr, peaks_ptr, weights_ptr, decays_ptr, sums_ptr, tops_ptr, _, _, _ = scratch
    # A power of two, at least a piece's tiles.
    BLOCK: gl.constexpr = 1 << (PIECE // 64 - 1).bit_length()
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    SR: gl.constexpr = gl.SliceLayout(1, SCORES)
    PEAKS: gl.constexpr = gl.BlockedLayout([BLOCK, 1], [1, 32], [1, 4], [0, 1])
    token = gl.program_id(1)
    head_tile, key_tile = heads_and_keys(HEADS)
    stop = COUNT(keys, token)
    slot = tile_slot(token, head_tile, key_tile, key_tiles, HEADS)
    row = gl.arange(0, 64, SR)
    column = gl.arange(0, 64, gl.SliceLayout(0, SCORES))
    earlier = gl.arange(0, BLOCK, gl.SliceLayout(1, PEAKS))
    head = gl.arange(0, 64, gl.SliceLayout(0, PEAKS))
    wait_for_last_launch()
    if key_tile * 64 < stop:
        place = key_tile % (PIECE // 64)  # in its piece
        at = row[:, None] * 64 + column[None, :]
        scores = gl.load(scores_ptr + slot * 4096 + at, cache_modifier=".cg")
        peak = gl.load(peaks_ptr + slot * 64 + row, cache_modifier=".cg")
        before = gl.load(
            peaks_ptr + (slot - place) * 64 + earlier[:, None] * 64 + head[None, :],
            mask=(earlier < place)[:, None] & (head < 64)[None, :], other=NO_KEYS, cache_modifier=".cg",
        )  # fmt: skip
        row_max = gl.convert_layout(gl.maximum(gl.max(before, 0), NO_KEYS), SR)
        new_max = gl.maximum(row_max, peak)
        blank = gl.zeros_like(scores)
        weights = gl.exp2(gl.fma(scores, blank + scale_log2, blank - new_max[:, None]))
        gl.store(weights_ptr + slot * 4096 + at, weights.to(gl.bfloat16))
        gl.store(decays_ptr + slot * 64 + row, gl.exp2(row_max - new_max))
        gl.store(sums_ptr + slot * 64 + row, gl.sum(weights, 1))
        gl.store(tops_ptr + slot * 64 + row, new_max)
