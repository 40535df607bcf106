"""top_logprobs in Triton: two launches, of (rows x tiles of the vocabulary) and of rows.

scan_tiles    per tile: the highest logit and the sum of exponentials; per chunk of 64 tokens the highest logit
rank_tokens   the sums merged in the order of the tiles; then, `count` times: the best chunk, its best token that
              was not taken yet, and what the chunk has left. So `count` chunks are read, and no row is sorted
"""

import torch
import triton
import triton.language as tl

CHUNK = 64
TILE_CHUNKS = 64
SCAN_WARPS = 8
RANK_WARPS = 8


@triton.jit
def scan_tiles(
    logits_ptr, maxima_ptr, tile_max_ptr, tile_sum_ptr, stride_row, V, num_chunks, TILE: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    chunks = tile * TILE + tl.arange(0, TILE)
    ids = chunks[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    logits = tl.load(logits_ptr + row * stride_row + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
    maxima = tl.max(logits, 1)
    tl.store(maxima_ptr + row * num_chunks + chunks, maxima, mask=chunks < num_chunks)
    highest = tl.max(maxima, 0)
    # A tile without a finite logit adds nothing.
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    at = row * tl.num_programs(1) + tile
    tl.store(tile_max_ptr + at, highest)
    tl.store(tile_sum_ptr + at, tl.sum(tl.sum(tl.exp(logits - shift), 1), 0))


@triton.jit
def rank_tokens(
    logits_ptr, tokens_ptr, maxima_ptr, tile_max_ptr, tile_sum_ptr, out_ptr, top_tokens_ptr, top_values_ptr,
    stride_row, V, num_chunks, num_tiles, count, BLOCK_TILES: tl.constexpr, BLOCK_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_row
    tiles = tl.arange(0, BLOCK_TILES)
    tile_max = tl.load(tile_max_ptr + row * num_tiles + tiles, mask=tiles < num_tiles, other=float("-inf"))
    tile_sum = tl.load(tile_sum_ptr + row * num_tiles + tiles, mask=tiles < num_tiles, other=0.0)
    highest = tl.max(tile_max, 0)
    log_sum = tl.log(tl.sum(tile_sum * tl.exp(tile_max - highest), 0))
    token = tl.load(tokens_ptr + row)
    tl.store(out_ptr + row, tl.load(logits_ptr + token).to(tl.float32) - highest - log_sum)
    index = tl.arange(0, BLOCK_CHUNKS)
    maxima = tl.load(maxima_ptr + row * num_chunks + index, mask=index < num_chunks, other=float("-inf"))
    taken = tl.full((), float("inf"), tl.float32)
    taken_id = tl.full((), -1, tl.int32)
    for place in range(count):
        best = tl.max(maxima, 0)
        chunk = tl.min(tl.where(maxima == best, index, num_chunks - 1), 0)
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        logits = tl.load(logits_ptr + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
        # Every token that ranks before the one taken last was taken, too.
        is_left = (ids < V) & ((logits < taken) | ((logits == taken) & (ids > taken_id)))
        taken_id = tl.min(tl.where(is_left & (logits == best), ids, V - 1), 0)
        taken = best
        is_left = is_left & ((logits < taken) | ((logits == taken) & (ids > taken_id)))
        left = tl.max(tl.where(is_left, logits, float("-inf")), 0)
        maxima = tl.where(index == chunk, left, maxima)
        tl.store(top_tokens_ptr + row * count + place, taken_id)
        tl.store(top_values_ptr + row * count + place, best - highest - log_sum)


def launch(
    logits: torch.Tensor, tokens: torch.Tensor, out: torch.Tensor, top_tokens: torch.Tensor, top_values: torch.Tensor
) -> None:
    """Fills out, top_tokens and top_values; checked, non-empty arguments."""
    rows, vocab_size = logits.shape
    num_chunks = triton.cdiv(vocab_size, CHUNK)
    tile = min(TILE_CHUNKS, triton.next_power_of_2(num_chunks))
    num_tiles = triton.cdiv(num_chunks, tile)
    maxima = torch.empty(rows, num_chunks, dtype=torch.float32, device=logits.device)
    tile_max, tile_sum = torch.empty(2, rows, num_tiles, dtype=torch.float32, device=logits.device)
    with torch.cuda.device_of(logits):
        scan_tiles[(rows, num_tiles)](
            logits, maxima, tile_max, tile_sum, logits.stride(0), vocab_size, num_chunks,
            TILE=tile, CHUNK=CHUNK, num_warps=SCAN_WARPS,
        )  # fmt: skip
        rank_tokens[(rows,)](
            logits, tokens, maxima, tile_max, tile_sum, out, top_tokens, top_values, logits.stride(0), vocab_size,
            num_chunks, num_tiles, top_tokens.shape[1], BLOCK_TILES=triton.next_power_of_2(num_tiles),
            BLOCK_CHUNKS=triton.next_power_of_2(num_chunks), CHUNK=CHUNK, num_warps=RANK_WARPS,
        )  # fmt: skip
