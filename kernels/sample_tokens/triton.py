"""sample_tokens in Triton: two launches, of (rows x tiles of the vocabulary) and of rows.

    score_tiles     per tile: the best score, the best score with noise, and the best score of each chunk of 64 tokens
    choose_tokens   merges them. A greedy or unfiltered row is done. Else the draw of the whole row is the draw of the
                    kept tokens if it is one of them; if not, only tokens that rank before it can be kept, so draw
                    again among these: 1 + ln(1 / top_p) draws on average. top-k starts from the k-th best chunk, which
                    no kept token is below, so chunks without candidates are never read

Masses are sums of integers, so no order of summation changes one.
"""

import torch
import triton
import triton.language as tl

from kernels.sample_tokens.params import SamplingTensors, TokenCounts
from kernels.sample_tokens.reference import MASS_UNIT
from kernels.scores.triton import gumbel, order_key, penalised, row_counts, score_of

CHUNK = 64
# Of one step of a program: 4,096 tokens, 8 or 16 of each thread, which spills no register.
TILE_CHUNKS = 64
SCORE_WARPS = 8
CHOOSE_WARPS = 16

UNIT: tl.constexpr = tl.constexpr(MASS_UNIT)
# The place of -inf in the order of fp32 numbers as integers.
LOWEST_KEY: tl.constexpr = tl.constexpr(-2139095041)


@triton.jit
def score_tiles(
    logits_ptr,
    temperature_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    key_low_ptr,
    key_high_ptr,
    slots_ptr,
    counts_ptr,
    token_ids_ptr,
    positions_ptr,
    rows_ptr,
    maxima_ptr,
    best_ptr,
    best_id_ptr,
    stride_row,
    V,
    num_chunks,
    TILE_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    COUNTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    chunks = tile * TILE_CHUNKS + tl.arange(0, TILE_CHUNKS)
    ids = chunks[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    ok = ids < V
    counts_ptr, newest, counted = row_counts(
        row, slots_ptr, counts_ptr, token_ids_ptr, positions_ptr, rows_ptr, V, COUNTS
    )
    penalties = (tl.load(repetition_ptr + row), tl.load(presence_ptr + row), tl.load(frequency_ptr + row))
    source = (logits_ptr + row * stride_row, V, counts_ptr, newest, counted, penalties)
    score = penalised(source, ids, ok, COUNTS)
    maxima = tl.max(score, 1)
    tl.store(maxima_ptr + row * num_chunks + chunks, maxima, mask=chunks < num_chunks)
    best = tl.max(maxima, 0)
    best_id = tl.min(tl.min(tl.where((score == best) & ok, ids, V), 1), 0)
    # Without and with noise, side by side.
    at = (row * tl.num_programs(1) + tile) * 2
    tl.store(best_ptr + at, best)
    tl.store(best_id_ptr + at, best_id)
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0:
        low = tl.load(key_low_ptr + row).to(tl.uint32)
        high = tl.load(key_high_ptr + row).to(tl.uint32)
        noisy = tl.math.div_rn(score, temperature) + gumbel(ids, low, high)
        best = tl.max(tl.max(tl.where(ok, noisy, float("-inf")), 1), 0)
        best_id = tl.min(tl.min(tl.where((noisy == best) & ok, ids, V), 1), 0)
        tl.store(best_ptr + at + 1, best)
        tl.store(best_id_ptr + at + 1, best_id)


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
def _best_of_tiles(best_ptr, best_id_ptr, tiles, num_tiles, V):
    best = tl.load(best_ptr + tiles * 2, mask=tiles < num_tiles, other=float("-inf"))
    best_ids = tl.load(best_id_ptr + tiles * 2, mask=tiles < num_tiles, other=V)
    highest = tl.max(best, 0)
    return highest, tl.minimum(tl.min(tl.where(best == highest, best_ids, V), 0), V - 1)


@triton.jit
def _kept_draw(
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


@triton.jit
def choose_tokens(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    key_low_ptr,
    key_high_ptr,
    slots_ptr,
    counts_ptr,
    token_ids_ptr,
    positions_ptr,
    rows_ptr,
    maxima_ptr,
    best_ptr,
    best_id_ptr,
    list_ptr,
    out_ptr,
    stride_row,
    V,
    num_chunks,
    num_tiles,
    BLOCK_TILES: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    TILE_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    COUNTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    counts_ptr, newest, counted = row_counts(
        row, slots_ptr, counts_ptr, token_ids_ptr, positions_ptr, rows_ptr, V, COUNTS
    )
    temperature = tl.load(temperature_ptr + row)
    tiles = row * num_tiles + tl.arange(0, BLOCK_TILES)
    end = (row + 1) * num_tiles
    highest, best_token = _best_of_tiles(best_ptr, best_id_ptr, tiles, end, V)
    token = best_token
    if temperature > 0:
        _, token = _best_of_tiles(best_ptr + 1, best_id_ptr + 1, tiles, end, V)
        top_k = tl.load(top_k_ptr + row)
        top_p = tl.load(top_p_ptr + row)
        min_p = tl.load(min_p_ptr + row)
        if ((top_k > 0) & (top_k < V)) | (top_p < 1.0) | (min_p > 0.0):
            keys = (tl.load(key_low_ptr + row).to(tl.uint32), tl.load(key_high_ptr + row).to(tl.uint32))
            penalties = (tl.load(repetition_ptr + row), tl.load(presence_ptr + row), tl.load(frequency_ptr + row))
            source = (logits_ptr + row * stride_row, V, counts_ptr, newest, counted, penalties)
            token = _kept_draw(
                token, best_token, highest, (top_k, top_p, min_p), keys,
                (source, temperature, list_ptr + row * num_chunks), maxima_ptr + row * num_chunks, num_chunks,
                BLOCK_CHUNKS, TILE_CHUNKS, CHUNK, COUNTS,
            )  # fmt: skip
    tl.store(out_ptr + row, token)
    if COUNTS:  # noqa: SIM102
        if newest >= 0:
            # All that the row reads of its counts has been read.
            tl.debug_barrier()
            tl.store(counts_ptr + newest, tl.load(counts_ptr + newest) + 2)
            tl.store(counts_ptr + V, tl.load(counts_ptr + V) + 1)


def launch(logits: torch.Tensor, params: SamplingTensors, counts: TokenCounts | None, out: torch.Tensor) -> None:
    """Fills out; checked, non-empty arguments."""
    rows, vocab_size = logits.shape
    num_chunks = triton.cdiv(vocab_size, CHUNK)
    tile_chunks = min(TILE_CHUNKS, triton.next_power_of_2(num_chunks))
    num_tiles = triton.cdiv(num_chunks, tile_chunks)
    maxima = torch.empty(rows, num_chunks, dtype=torch.float32, device=logits.device)
    listed = torch.empty_like(maxima, dtype=torch.int32)
    best = torch.empty(rows, num_tiles, 2, dtype=torch.float32, device=logits.device)
    best_ids = torch.empty_like(best, dtype=torch.int32)
    penalties = (params.repetition, params.presence, params.frequency, params.key_low, params.key_high, params.slots)
    # Without counts nothing is read there.
    history = (out,) * 4 if counts is None else tuple(counts)
    sizes = {"CHUNK": CHUNK, "TILE_CHUNKS": tile_chunks, "COUNTS": counts is not None}
    # Products and sums are rounded apart, as torch does.
    options = {"enable_fp_fusion": False}
    with torch.cuda.device_of(logits):
        score_tiles[(rows, num_tiles)](
            logits, params.temperature, *penalties, *history, maxima, best, best_ids, logits.stride(0), vocab_size,
            num_chunks, num_warps=SCORE_WARPS, **sizes, **options,
        )  # fmt: skip
        choose_tokens[(rows,)](
            logits, params.temperature, params.top_k, params.top_p, params.min_p, *penalties, *history, maxima, best,
            best_ids, listed, out, logits.stride(0), vocab_size, num_chunks, num_tiles,
            BLOCK_TILES=triton.next_power_of_2(num_tiles), BLOCK_CHUNKS=triton.next_power_of_2(num_chunks),
            num_warps=CHOOSE_WARPS, **sizes, **options,
        )  # fmt: skip
