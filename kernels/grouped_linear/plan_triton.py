"""The plan of an expert layer, a counting sort of its pairs: of few pairs in one launch, of many in two.

Few: one program for one expert looks at all pairs twice. First it counts every expert's pairs, so that it knows where
its own begin; then it places these in order. Many: see `chunks_triton`. Counts and places are sums of integers: no
program waits for another, and nothing depends on which comes first.
"""

import torch
import triton
import triton.language as tl

from kernels.grouped_linear.chunks_triton import launch_chunks
from kernels.grouped_linear.plan import ExpertPlan
from kernels.launches import allow_next_launch_and_wait, overlap_options

# Pairs that are few: each size is compiled. On an H200 640 pairs of 512 experts take 10 us here and 12 in chunks, 5,120
# take 43 and 14.
FEW_PAIRS = (128, 1024)
# Tiles that a program writes in one step.
TILES = 128


# What changes from batch to batch is not specialised on: a new value must not mean a new compilation.
@triton.jit(do_not_specialize=["num_pairs", "tile_rows"])
def place_few(
    ids_ptr,
    order_ptr,
    starts_ptr,
    tiles_ptr,
    num_tiles_ptr,
    num_pairs,
    tile_rows,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PAIRS: tl.constexpr,
    TILES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    allow_next_launch_and_wait(OVERLAPS)
    expert = tl.program_id(0)
    experts = tl.arange(0, BLOCK_E)
    pair = tl.arange(0, PAIRS)
    ids = tl.load(ids_ptr + pair, mask=pair < num_pairs, other=-1)
    # Of experts before this one. The last expert is before none, so it may lie beyond the block: its own pairs are
    # counted below.
    counts = tl.histogram(ids, BLOCK_E, mask=(ids >= 0) & (ids < E) & (ids < BLOCK_E))
    tiles = (counts + tile_rows - 1) // tile_rows
    start = tl.sum(tl.where(experts < expert, counts, 0), 0)
    first_tile = tl.sum(tl.where(experts < expert, tiles, 0), 0)
    is_own = (ids == expert).to(tl.int32)
    count = tl.sum(is_own, 0)
    own_tiles = (count + tile_rows - 1) // tile_rows
    tl.store(starts_ptr + expert, start)
    if expert == E - 1:
        tl.store(starts_ptr + E, start + count)
        tl.store(num_tiles_ptr, first_tile + own_tiles)
    for first in range(0, own_tiles, TILES):
        tile = first + tl.arange(0, TILES)
        row = tiles_ptr + (first_tile + tile) * 2
        tl.store(row, expert, mask=tile < own_tiles)
        tl.store(row + 1, start + tile * tile_rows, mask=tile < own_tiles)
    if count > 0:
        tl.store(order_ptr + start + tl.cumsum(is_own, 0) - 1, pair, mask=is_own > 0)


def launch(expert_ids: torch.Tensor, plan: ExpertPlan) -> None:
    """Fills the plan; checked, non-empty arguments."""
    num_experts = plan.num_experts
    pairs = next((size for size in FEW_PAIRS if size >= plan.num_pairs), None)
    with torch.cuda.device_of(expert_ids):
        if pairs is None:
            launch_chunks(expert_ids, plan, max(16, triton.next_power_of_2(num_experts)))
            return
        place_few[(num_experts,)](
            expert_ids,
            *plan[:4],
            plan.num_pairs,
            plan.tile_rows,
            E=num_experts,
            # Without the last expert: with a fused shared one there are often one more than a power of two.
            BLOCK_E=max(16, triton.next_power_of_2(num_experts - 1)),
            PAIRS=pairs,
            TILES=TILES,
            num_warps=4,
            **overlap_options(expert_ids.device),
        )
