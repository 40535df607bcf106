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

from kernels.sample_tokens.kept_triton import kept_draw
from kernels.sample_tokens.params import SamplingTensors, TokenCounts
from kernels.scores.triton import gumbel, penalised, row_counts

CHUNK = 64
# Of one step of a program: 4,096 tokens, 8 or 16 of each thread, which spills no register.
TILE_CHUNKS = 64
SCORE_WARPS = 8
CHOOSE_WARPS = 16


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
def _best_of_tiles(best_ptr, best_id_ptr, tiles, num_tiles, V):
    best = tl.load(best_ptr + tiles * 2, mask=tiles < num_tiles, other=float("-inf"))
    best_ids = tl.load(best_id_ptr + tiles * 2, mask=tiles < num_tiles, other=V)
    highest = tl.max(best, 0)
    return highest, tl.minimum(tl.min(tl.where(best == highest, best_ids, V), 0), V - 1)


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
            token = kept_draw(
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
