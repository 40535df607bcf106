"""Launches sparse_latent_attention of few rows: two launches, the second beginning while the first ends."""

import torch
import triton

from kernels.device import num_multiprocessors
from kernels.softmax import LOG2_E
from kernels.sparse_latent_attention.call import SparseLatentCall
from kernels.sparse_latent_attention.hopper import LATENT, PIECE
from kernels.sparse_latent_attention.hopper.few import VALUES, WEIGHTS, attend_in_phases

TILE = 64  # heads, chosen latents and value columns of a program
# Latents of a program of the first launch and heads of one of the second, the first that are on the card together: the
# second launch's read lists and latents while the first one makes weights. Microseconds of one row on an H200, 16
# heads: 10.9, with (64, 8) 11.6, with (64, 16) 12.0; 128 heads: 13.5, with (64, 16) 13.6.
FORMS = ((32, 8), (32, 16), (64, 16), (64, 32))
# Otherwise: four rows of 128 heads take 24.6 us, with (64, 32) 27.5.
LAST_FORM = (64, 64)
MOST_HEADS_OF_FOUR_WARPS = 32


def form_of(tokens: int, heads: int, k: int, multiprocessors: int) -> tuple[int, int]:
    """Returns how many latents a program of the first launch has, and how many heads one of the second."""
    columns = tokens * (LATENT // TILE) * triton.cdiv(k, PIECE)

    def programs(form: tuple[int, int]) -> int:
        return int(tokens * triton.cdiv(heads, TILE) * triton.cdiv(k, form[0]) + columns * triton.cdiv(heads, form[1]))

    fits = (form for form in FORMS if programs(form) <= multiprocessors)
    keys, group = next(fits, FORMS[-1] if columns * triton.cdiv(heads, FORMS[-1][1]) <= multiprocessors else LAST_FORM)
    return keys, min(group, max(int(triton.next_power_of_2(heads)), FORMS[0][1]))


def attend_few(call: SparseLatentCall, out: torch.Tensor) -> None:
    """Fills out over checked, non-empty arguments, with the bits of the kernel for many rows."""
    q, pages, k = call.q, call.pages, call.chosen.shape[1]
    tokens, heads, width = q.shape
    keys, group = form_of(tokens, heads, k, num_multiprocessors(q.device))
    tiles, pieces = triton.cdiv(heads, TILE) * triton.cdiv(k, TILE), triton.cdiv(k, PIECE)
    parts, halves = triton.cdiv(heads, group) * (LATENT // TILE), TILE // keys
    warps = 4 if group <= MOST_HEADS_OF_FOUR_WARPS else 8

    def buffer(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty((tokens, *shape), dtype=dtype, device=q.device)

    weights = buffer(tiles, TILE, TILE, dtype=q.dtype)
    tops, sums = (buffer(tiles, halves, TILE) for _ in range(2))
    acc, row_sum = buffer(parts, pieces, TILE, group), buffer(parts, pieces, 2, group)
    arrivals = buffer(triton.next_power_of_2(parts), dtype=torch.int32)
    phases = ((WEIGHTS, (tiles * halves, tokens), 4), (VALUES, (parts, tokens, pieces), warps))
    with torch.cuda.device_of(q):
        for phase, grid, num_warps in phases:
            attend_in_phases[grid](
                q, pages, call.block_tables, *call.rows, call.chosen, out, weights, tops, sums, acc, row_sum, arrivals,
                call.scale * LOG2_E, pages.stride(0) // width, call.block_tables.stride(0), PHASE=phase.value,
                PIECE=PIECE, K=k, HEADS=heads, PAGE=pages.shape[1], KEYS=keys, GROUP=group, ARRIVALS=arrivals.shape[1],
                WARPS=num_warps, num_warps=num_warps, launch_pdl=True,
            )  # fmt: skip
