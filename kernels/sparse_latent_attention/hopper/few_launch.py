"""Launches sparse_latent_attention of few rows: three launches, each beginning while the one before it ends."""

import torch
import triton

from kernels.device import num_multiprocessors
from kernels.hopper.gathered.few.programs import PARTS, REGISTERS_OF_BOTH, heads_of_both
from kernels.softmax import LOG2_E
from kernels.sparse_latent_attention.call import SparseLatentCall
from kernels.sparse_latent_attention.hopper import PIECE
from kernels.sparse_latent_attention.hopper.few import BOTH, SCORES, VALUES, WEIGHTS, attend_in_phases

TILE = 64  # heads, chosen latents and value columns of a program
# Heads of a program of the last launch, at least and as a rule at most. Of 128 heads, 8, 16 and 32 take 22.9, 16.3 and
# 15.6 us for one row on an H200. Twice as many where programs are more than multiprocessors otherwise: with 32 and 64
# one row takes 15.2 and 16.9 us, two 17.7 and 18.6, three 28.1 and 23.7, four 30.3 and 25.2.
LEAST_GROUP, GROUP = 8, 32
# The same where they make weights too, which they do where all of them run beside those that score: of 16, 32 and 64
# heads one row takes 13.1, 13.5 and 15.0 us so, in three launches 14.2, 15.2 and 15.5, two rows of 16 heads 14.4 and
# 15.7; of 128 heads, in groups of 32, one takes 17.8 and 15.7.
GROUPS_OF_BOTH = (8, 16)


def group_of(heads: int, parts: int, multiprocessors: int) -> int:
    """Returns how many heads a program of the last launch has; `parts` are the programs that a group of heads has."""
    group = min(max(int(triton.next_power_of_2(heads)), LEAST_GROUP), GROUP)
    fits = parts * triton.cdiv(heads, group) <= multiprocessors
    return group if fits or heads <= group else 2 * group


def attend_few(call: SparseLatentCall, out: torch.Tensor) -> None:
    """Fills out over checked, non-empty arguments, with the bits of the kernel for many rows."""
    q, pages, k = call.q, call.pages, call.chosen.shape[1]
    tokens, heads, width = q.shape
    tiles, pieces = triton.cdiv(heads, TILE) * triton.cdiv(k, TILE), triton.cdiv(k, PIECE)
    room = num_multiprocessors(q.device)
    both = heads_of_both(GROUPS_OF_BOTH, heads, tokens * pieces, room - tokens * tiles)
    group = both or group_of(heads, tokens * PARTS * pieces, room)
    parts = triton.cdiv(heads, group) * PARTS

    def buffer(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty((tokens, *shape), dtype=dtype, device=q.device)

    scores, peaks, weighed = buffer(tiles, TILE, TILE), buffer(tiles, TILE), 0 if both else tiles
    weights = buffer(weighed, TILE, TILE, dtype=q.dtype)
    decays, sums, tops = (buffer(weighed, TILE) for _ in range(3))
    acc = buffer(parts, pieces, TILE, group)
    row_sum, row_max = (buffer(parts, pieces, group) for _ in range(2))
    arrivals = buffer(triton.next_power_of_2(parts), dtype=torch.int32)
    phases = [(SCORES, (tiles, tokens)), (WEIGHTS, (tiles, tokens)), (VALUES, (parts, tokens, pieces))]
    if both:
        phases[1:] = [(BOTH, (parts, tokens, pieces))]
    with torch.cuda.device_of(q):
        for phase, grid in phases:
            attend_in_phases[grid](
                q, pages, call.block_tables, *call.rows, call.chosen, out, scores, peaks, weights, decays, sums, tops,
                acc, row_sum, row_max, arrivals, call.scale * LOG2_E, pages.stride(0) // width,
                call.block_tables.stride(0), PHASE=phase.value, PIECE=PIECE, K=k, HEADS=heads, PAGE=pages.shape[1],
                GROUP=group, ARRIVALS=arrivals.shape[1], num_warps=4, launch_pdl=True,
                maxnreg=REGISTERS_OF_BOTH if phase is BOTH else None,
            )  # fmt: skip
