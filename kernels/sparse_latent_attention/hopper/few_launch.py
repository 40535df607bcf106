"""Launches sparse_latent_attention of few rows: three launches, each beginning while the one before it ends."""

import torch
import triton

from kernels.device import num_multiprocessors
from kernels.softmax import LOG2_E
from kernels.sparse_latent_attention.call import SparseLatentCall
from kernels.sparse_latent_attention.hopper import PIECE
from kernels.sparse_latent_attention.hopper.few import SCORES, VALUES, WEIGHTS, attend_in_phases

TILE = 64  # heads, chosen latents and value columns of a program
# Heads of a program of the last launch, at least and as a rule at most. Of 128 heads, 8, 16 and 32 take 22.9, 16.3 and
# 15.6 us for one row on an H200. Twice as many where programs are more than multiprocessors otherwise: with 32 and 64
# one row takes 15.2 and 16.9 us, two 17.7 and 18.6, three 28.1 and 23.7, four 30.3 and 25.2.
LEAST_GROUP, GROUP = 8, 32


def group_of(heads: int, parts: int, multiprocessors: int) -> int:
    """Returns how many heads a program of the last launch has; `parts` are the programs that a group of heads has."""
    group = min(max(int(triton.next_power_of_2(heads)), LEAST_GROUP), GROUP)
    fits = parts * triton.cdiv(heads, group) <= multiprocessors
    return group if fits or heads <= group else 2 * group


def attend_few(call: SparseLatentCall, out: torch.Tensor) -> None:
    """Fills out over checked, non-empty arguments, with the bits of the kernel for many rows."""
    q, pages, k = call.q, call.pages, call.chosen.shape[1]
    tokens, heads, width = q.shape
    tiles, pieces, columns = triton.cdiv(heads, TILE) * triton.cdiv(k, TILE), triton.cdiv(k, PIECE), call.latent // TILE
    group = group_of(heads, tokens * columns * pieces, num_multiprocessors(q.device))
    parts = triton.cdiv(heads, group) * columns

    def buffer(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty((tokens, *shape), dtype=dtype, device=q.device)

    scores, weights = buffer(tiles, TILE, TILE), buffer(tiles, TILE, TILE, dtype=q.dtype)
    peaks, decays, sums, tops = (buffer(tiles, TILE) for _ in range(4))
    acc, row_sum = buffer(parts, pieces, TILE, group), buffer(parts, pieces, group)
    arrivals = buffer(triton.next_power_of_2(parts), dtype=torch.int32)
    with torch.cuda.device_of(q):
        for phase, grid in ((SCORES, (tiles, tokens)), (WEIGHTS, (tiles, tokens)), (VALUES, (parts, tokens, pieces))):
            attend_in_phases[grid](
                q, pages, call.block_tables, *call.rows, call.chosen, out, scores, peaks, weights, decays, sums, tops,
                acc, row_sum, arrivals, call.scale * LOG2_E, pages.stride(0) // width, call.block_tables.stride(0),
                PHASE=phase.value, PIECE=PIECE, K=k, HEADS=heads, PAGE=pages.shape[1], GROUP=group,
                ARRIVALS=arrivals.shape[1], num_warps=4, launch_pdl=True,
            )  # fmt: skip
