"""The plan of an expert layer in one launch: one program for one expert, which looks at all pairs twice.

First it counts every expert's pairs, so that it knows where its own begin; then it places these in order. Counts are
sums of integers and places are running sums: no program waits for another, and nothing depends on which comes first.
"""

import torch
import triton
import triton.language as tl

from kernels.grouped_linear.plan import ExpertPlan

# Pairs that a program looks at in one step: few sizes, since each is compiled, and at least one for each thread.
CHUNKS = (128, 1024, 4096)


# What changes from batch to batch is not specialised on: a new value must not mean a new compilation.
@triton.jit(do_not_specialize=["num_pairs", "tile_rows"])
def place_pairs(
    ids_ptr,
    order_ptr,
    starts_ptr,
    tiles_ptr,
    num_tiles_ptr,
    num_pairs,
    tile_rows,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    CHUNK: tl.constexpr,
):
    expert = tl.program_id(0)
    experts = tl.arange(0, BLOCK_E)
    within = tl.arange(0, CHUNK)
    counts = tl.zeros((BLOCK_E,), tl.int32)
    for first in range(0, num_pairs, CHUNK):
        ids = tl.load(ids_ptr + first + within, mask=first + within < num_pairs, other=-1)
        counts += tl.histogram(ids, BLOCK_E, mask=(ids >= 0) & (ids < E))
    tiles = (counts + tile_rows - 1) // tile_rows
    start = tl.sum(tl.where(experts < expert, counts, 0), 0)
    first_tile = tl.sum(tl.where(experts < expert, tiles, 0), 0)
    count = tl.sum(tl.where(experts == expert, counts, 0), 0)
    own_tiles = tl.sum(tl.where(experts == expert, tiles, 0), 0)
    tl.store(starts_ptr + expert, start)
    if expert == E - 1:
        tl.store(starts_ptr + E, start + count)
        tl.store(num_tiles_ptr, first_tile + own_tiles)
    for first in range(0, own_tiles, CHUNK):
        tile = first + within
        row = tiles_ptr + (first_tile + tile) * 2
        tl.store(row, expert, mask=tile < own_tiles)
        tl.store(row + 1, start + tile * tile_rows, mask=tile < own_tiles)
    if count > 0:
        for first in range(0, num_pairs, CHUNK):
            ids = tl.load(ids_ptr + first + within, mask=first + within < num_pairs, other=-1)
            is_own = (ids == expert).to(tl.int32)
            tl.store(order_ptr + start + tl.cumsum(is_own, 0) - 1, first + within, mask=is_own > 0)
            start += tl.sum(is_own, 0)


def launch(expert_ids: torch.Tensor, plan: ExpertPlan) -> None:
    """Fills the plan; checked, non-empty arguments."""
    num_experts = plan.num_experts
    chunk = next((size for size in CHUNKS if size >= plan.num_pairs), CHUNKS[-1])
    with torch.cuda.device_of(expert_ids):
        place_pairs[(num_experts,)](
            expert_ids,
            *plan[:4],
            plan.num_pairs,
            plan.tile_rows,
            E=num_experts,
            BLOCK_E=max(16, triton.next_power_of_2(num_experts)),
            CHUNK=chunk,
            num_warps=4 if chunk <= 1024 else 8,
        )
