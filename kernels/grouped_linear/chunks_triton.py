"""The plan of an expert layer with many pairs, in chunks.

A program of the first launch counts each expert's pairs in a chunk. One of the second places the pairs of a chunk:
behind those of lower experts, those of its expert in earlier chunks, and those before it in its own. One more lists the
tiles.

A program for each expert that looks at all pairs took 100 us for 20,480 pairs of 512 experts on an H200; this takes 20.
"""

import torch
import triton
import triton.language as tl

from kernels.grouped_linear.plan import ExpertPlan
from kernels.launches import allow_next_launch_and_wait, overlap_options

# Pairs of a chunk, and from how many on chunks are larger: a program reads the counts of all of them.
CHUNK, LARGE_CHUNK, MANY_PAIRS = 256, 512, 32768
# Chunks whose counts are loaded at once.
CHUNKS_AHEAD = 8
# Pairs that those of a chunk are compared with at once.
COMPARED = 8
NUM_WARPS = 8


@triton.jit
def _ids_of(ids_ptr, pair, num_pairs, E: tl.constexpr):
    """Returns the experts of these pairs, and which of them are in tiles."""
    ids = tl.load(ids_ptr + pair, mask=pair < num_pairs, other=-1)
    is_pair = (ids >= 0) & (ids < E)
    return tl.where(is_pair, ids, 0), is_pair


# What changes from batch to batch is not specialised on: a new value must not mean a new compilation.
@triton.jit(do_not_specialize=["num_pairs"])
def count_pairs(
    ids_ptr,
    counts_ptr,
    num_pairs,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    CHUNK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    allow_next_launch_and_wait(OVERLAPS)
    chunk = tl.program_id(0)
    ids, is_pair = _ids_of(ids_ptr, chunk * CHUNK + tl.arange(0, CHUNK), num_pairs, E)
    expert = tl.arange(0, BLOCK_E)
    tl.store(counts_ptr + chunk * E + expert, tl.histogram(ids, BLOCK_E, mask=is_pair), mask=expert < E)


@triton.jit
def _sums(counts_ptr, chunk, num_chunks, E: tl.constexpr, BLOCK_E: tl.constexpr, AHEAD: tl.constexpr):
    """Returns each expert's pairs in all chunks, and in those before this one."""
    expert = tl.arange(0, BLOCK_E)[None, :]
    total = tl.zeros((AHEAD, BLOCK_E), tl.int32)
    before = tl.zeros((AHEAD, BLOCK_E), tl.int32)
    for first in range(0, num_chunks, AHEAD):
        number = first + tl.arange(0, AHEAD)[:, None]
        counts = tl.load(counts_ptr + number * E + expert, mask=(number < num_chunks) & (expert < E), other=0)
        total += counts
        before += tl.where(number < chunk, counts, 0)
    return tl.sum(total, 0), tl.sum(before, 0)


@triton.jit
def _places_in_chunk(ids_ptr, ids, first, num_pairs, CHUNK: tl.constexpr, COMPARED: tl.constexpr):
    """Returns how many pairs of the same expert the chunk has before each of its pairs."""
    within = tl.arange(0, CHUNK)[None, :]
    found = tl.zeros((COMPARED, CHUNK), tl.int32)
    for begin in range(0, CHUNK, COMPARED):
        other = begin + tl.arange(0, COMPARED)
        other_ids = tl.load(ids_ptr + first + other, mask=first + other < num_pairs, other=-1)
        found += ((other_ids[:, None] == ids[None, :]) & (other[:, None] < within)).to(tl.int32)
    return tl.sum(found, 0)


@triton.jit
def _list_tiles(total, starts, starts_ptr, tiles_ptr, num_tiles_ptr, tile_rows, E: tl.constexpr, BLOCK_E: tl.constexpr):
    expert = tl.arange(0, BLOCK_E)
    tl.store(starts_ptr + expert, starts, mask=expert < E)
    tl.store(starts_ptr + E, tl.sum(total, 0))
    tiles = (total + tile_rows - 1) // tile_rows
    row = tiles_ptr + (tl.cumsum(tiles, 0) - tiles) * 2
    tl.store(num_tiles_ptr, tl.sum(tiles, 0))
    for tile in range(tl.max(tiles, 0)):
        tl.store(row + 2 * tile, expert, mask=tile < tiles)
        tl.store(row + 2 * tile + 1, starts + tile * tile_rows, mask=tile < tiles)


@triton.jit(do_not_specialize=["num_pairs", "num_chunks", "tile_rows"])
def place_chunks(
    ids_ptr,
    counts_ptr,
    order_ptr,
    starts_ptr,
    tiles_ptr,
    num_tiles_ptr,
    num_pairs,
    num_chunks,
    tile_rows,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    CHUNK: tl.constexpr,
    AHEAD: tl.constexpr,
    COMPARED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """The program behind those of all chunks lists the tiles."""
    allow_next_launch_and_wait(OVERLAPS)
    chunk = tl.program_id(0)
    total, before = _sums(counts_ptr, chunk, num_chunks, E, BLOCK_E, AHEAD)
    starts = tl.cumsum(total, 0) - total
    if chunk == num_chunks:
        _list_tiles(total, starts, starts_ptr, tiles_ptr, num_tiles_ptr, tile_rows, E, BLOCK_E)
    else:
        first = chunk * CHUNK
        pair = first + tl.arange(0, CHUNK)
        ids, is_pair = _ids_of(ids_ptr, pair, num_pairs, E)
        place = tl.gather(starts + before, ids, 0)
        place += _places_in_chunk(ids_ptr, ids, first, num_pairs, CHUNK, COMPARED)
        tl.store(order_ptr + place, pair, mask=is_pair)


def launch_chunks(expert_ids: torch.Tensor, plan: ExpertPlan, block: int) -> None:
    """Fills the plan; checked, non-empty arguments. block is a power of two, no less than the number of experts."""
    chunk = LARGE_CHUNK if plan.num_pairs >= MANY_PAIRS else CHUNK
    num_chunks = triton.cdiv(plan.num_pairs, chunk)
    counts = plan.starts.new_empty((num_chunks, plan.num_experts))
    sizes = {"E": plan.num_experts, "BLOCK_E": block, "CHUNK": chunk}
    options = {"num_warps": NUM_WARPS, **overlap_options(expert_ids.device)}
    count_pairs[(num_chunks,)](expert_ids, counts, plan.num_pairs, **sizes, **options)
    place_chunks[(num_chunks + 1,)](
        expert_ids,
        counts,
        *plan[:4],
        plan.num_pairs,
        num_chunks,
        plan.tile_rows,
        AHEAD=CHUNKS_AHEAD,
        COMPARED=COMPARED,
        **sizes,
        **options,
    )
