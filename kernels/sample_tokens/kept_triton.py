"""The draw among the tokens that top-k, top-p and min-p keep, in Triton; jit functions of one row's program."""

import triton
import triton.language as tl

from kernels.sample_tokens.reference import MASS_UNIT
from kernels.scores.triton import gumbel, order_key, penalised, score_of

UNIT: tl.constexpr = tl.constexpr(MASS_UNIT)
# The place of -inf in the order of fp32 numbers as integers.
LOWEST_KEY: tl.constexpr = tl.constexpr(-2139095041)


@triton.jit
def _list_chunks(list_ptr, maxima, low, index, ok):
    """Lists the chunks that have a score of `low` or more. Returns how many."""
    chosen = ok & (maxima >= low)
    # What the list held may still be read.
    tl.debug_barrier()
    tl.store(list_ptr + tl.cumsum(chosen.to(tl.int32), 0) - 1, index, mask=chosen)
    tl.debug_barrier()
    return tl.sum(chosen.to(tl.int32), 0)


@triton.jit
def _kth_best(score, ok, k, highest):
    """The k-th best of the scores, -inf if there are fewer."""
    keys = order_key(score)
    lo = tl.full((), LOWEST_KEY, tl.int64)
    hi = order_key(highest).to(tl.int64)
    while lo < hi:
        middle = hi - (hi - lo) // 2
        enough = tl.sum((ok & (keys.to(tl.int64) >= middle)).to(tl.int32), 0) >= k
        lo = tl.where(enough, middle, lo)
        hi = tl.where(enough, hi, middle - 1)
    return score_of(lo)


@triton.jit
def _listed_scores(start, row, num_listed, TILE: tl.constexpr, CHUNK: tl.constexpr, COUNTS: tl.constexpr):
    """The tokens of the TILE chunks from `start` on in the list: their ids, which of them are there, their scores."""
    source, temperature, list_ptr = row
    listed = start + tl.arange(0, TILE) < num_listed
    chunks = tl.load(list_ptr + start + tl.arange(0, TILE), mask=listed, other=0)
    ids = chunks[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    ok = listed[:, None] & (ids < source[1])
    return ids, ok, tl.math.div_rn(penalised(source, ids, ok, COUNTS), temperature)


@triton.jit
def _mass(score, highest):
    """What a token of this score adds to a sum of probabilities."""
    return (tl.exp(score - highest) * UNIT).to(tl.int64)


@triton.jit
def _kth_best_listed(low, highest, k, row, num_listed, TILE: tl.constexpr, CHUNK: tl.constexpr, COUNTS: tl.constexpr):
    """The k-th best score, which is not below `low`, and the mass of the k best tokens."""
    lo = order_key(low).to(tl.int64)
    hi = order_key(highest).to(tl.int64)
    while lo < hi:
        middle = hi - (hi - lo) // 2
        found = tl.zeros((TILE,), tl.int32)
        for start in range(0, num_listed, TILE):
            _, ok, score = _listed_scores(start, row, num_listed, TILE, CHUNK, COUNTS)
            found += tl.sum((ok & (order_key(score).to(tl.int64) >= middle)).to(tl.int32), 1)
        enough = tl.sum(found, 0) >= k
        lo = tl.where(enough, middle, lo)
        hi = tl.where(enough, hi, middle - 1)
    kth = score_of(lo)
    above = tl.zeros((TILE,), tl.int32)
    mass = tl.zeros((TILE,), tl.int64)
    for start in range(0, num_listed, TILE):
        _, ok, score = _listed_scores(start, row, num_listed, TILE, CHUNK, COUNTS)
        is_above = ok & (score > kth)
        above += tl.sum(is_above.to(tl.int32), 1)
        mass += tl.sum(tl.where(is_above, _mass(score, highest), 0), 1)
    return kth, tl.sum(mass, 0) + (k - tl.sum(above, 0)) * _mass(kth, highest)


@triton.jit
def _before(token, bound, highest, row, num_listed, TILE: tl.constexpr, CHUNK: tl.constexpr, COUNTS: tl.constexpr):
    """How many tokens rank before one with the score `bound`, their mass, and the mass of all."""
    before = tl.zeros((TILE,), tl.int32)
    mass_before = tl.zeros((TILE,), tl.int64)
    mass = tl.zeros((TILE,), tl.int64)
    for start in range(0, num_listed, TILE):
        ids, ok, score = _listed_scores(start, row, num_listed, TILE, CHUNK, COUNTS)
        share = tl.where(ok, _mass(score, highest), 0)
        is_before = ok & ((score > bound) | ((score == bound) & (ids < token)))
        before += tl.sum(is_before.to(tl.int32), 1)
        mass_before += tl.sum(tl.where(is_before, share, 0), 1)
        mass += tl.sum(share, 1)
    return tl.sum(before, 0), tl.sum(mass_before, 0), tl.sum(mass, 0)


@triton.jit
def _redrawn(token, bound, low, keys, row, num_listed, TILE: tl.constexpr, CHUNK: tl.constexpr, COUNTS: tl.constexpr):
    """The draw among tokens that rank before this one and score `low` or more; V if there is none."""
    V = row[0][1]
    noisiest = tl.full((TILE,), float("-inf"), tl.float32)
    noisiest_id = tl.zeros((TILE,), tl.int32) + V
    for start in range(0, num_listed, TILE):
        ids, ok, score = _listed_scores(start, row, num_listed, TILE, CHUNK, COUNTS)
        is_before = ok & ((score > bound) | ((score == bound) & (ids < token))) & (score >= low)
        noisy = tl.where(is_before, score + gumbel(ids, keys[0], keys[1]), float("-inf"))
        best = tl.max(noisy, 1)
        best_id = tl.min(tl.where((noisy == best[:, None]) & is_before, ids, V), 1)
        is_better = (best > noisiest) | ((best == noisiest) & (best_id < noisiest_id))
        noisiest = tl.where(is_better, best, noisiest)
        noisiest_id = tl.where(is_better, best_id, noisiest_id)
    return tl.min(tl.where(noisiest == tl.max(noisiest, 0), noisiest_id, V), 0)


@triton.jit
def kept_draw(
    token,
    best_token,
    highest,
    params,
    keys,
    row,
    maxima_ptr,
    num_chunks,
    BLOCK_CHUNKS: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    COUNTS: tl.constexpr,
):
    """The draw among the tokens that the filters keep; `token` is the draw among all."""
    top_k, top_p, min_p = params
    source, temperature, list_ptr = row
    V = source[1]
    has_k = (top_k > 0) & (top_k < V)
    k = tl.where(has_k, top_k, V)
    highest = tl.math.div_rn(highest, temperature)
    index = tl.arange(0, BLOCK_CHUNKS)
    is_chunk = index < num_chunks
    maxima = tl.load(maxima_ptr + index, mask=is_chunk, other=float("-inf"))
    maxima = tl.math.div_rn(maxima, temperature)
    low = tl.full((), float("-inf"), tl.float32)
    if has_k:
        low = _kth_best(maxima, is_chunk, k, highest)
    num_listed = _list_chunks(list_ptr, maxima, low, index, is_chunk)
    # The mass of all tokens that top-k leaves; without top-k the first pass below takes it.
    total = tl.full((), -1, tl.int64)
    if has_k & (top_p < 1.0):
        low, total = _kth_best_listed(low, highest, k, row, num_listed, TILE, CHUNK, COUNTS)
    if min_p > 0.0:
        # The slack makes up for the rounding of the logarithm; the share itself is looked at below.
        low = tl.maximum(low, highest + tl.log(min_p) - (1e-3 + tl.abs(highest) * 1e-5))
    drawing = tl.full((), 1, tl.int32)
    while drawing > 0:
        drawn = tl.zeros((1,), tl.int32) + token
        bound = tl.max(tl.math.div_rn(penalised(source, drawn, drawn < V, COUNTS), temperature), 0)
        num_before, mass_before, mass = _before(token, bound, highest, row, num_listed, TILE, CHUNK, COUNTS)
        total = tl.where(total < 0, mass, total)
        reached = mass_before.to(tl.float64) >= top_p.to(tl.float64) * total.to(tl.float64)
        is_removed = (num_before >= k) | ((top_p < 1.0) & reached) | (tl.exp(bound - highest) < min_p)
        drawing = tl.where((num_before > 0) & is_removed, 1, 0)
        if drawing > 0:
            num_listed = _list_chunks(list_ptr, maxima, tl.maximum(low, bound), index, is_chunk)
            redrawn = _redrawn(token, bound, low, keys, row, num_listed, TILE, CHUNK, COUNTS)
            # Only a NaN leaves nothing to draw from.
            drawing = tl.where(redrawn < V, 1, 0)
            token = tl.where(redrawn < V, redrawn, best_token)
    return token
