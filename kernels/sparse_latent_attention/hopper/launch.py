"""Launches sparse_latent_attention's Gluon kernels: those for few rows, or the attention and a fold behind splits."""

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.device import num_multiprocessors
from kernels.softmax import LOG2_E
from kernels.sparse_latent_attention.call import SparseLatentCall
from kernels.sparse_latent_attention.hopper import PIECE, is_few
from kernels.sparse_latent_attention.hopper.few import FOLD, attend_in_phases
from kernels.sparse_latent_attention.hopper.few_launch import attend_few
from kernels.sparse_latent_attention.hopper.kernel import attend_gathered

# Heads of a tile, and tiles of latents on their way.
ROWS, STAGES = 64, 2


def launch(call: SparseLatentCall, out: torch.Tensor) -> None:
    """Launches over checked, non-empty arguments."""
    tokens, heads, _ = call.q.shape
    if is_few(tokens, heads):
        attend_few(call, out)
    else:
        # Pieces are programs of their own where less than half of the multiprocessors had work otherwise.
        splits = 2 * tokens * triton.cdiv(heads, ROWS) <= num_multiprocessors(call.q.device)
        attend(call, out, splits=splits)


def attend(call: SparseLatentCall, out: torch.Tensor, *, splits: bool) -> None:
    """Fills out, with the pieces of a query in programs of their own or in one: the bits are the same."""
    q, pages, k = call.q, call.pages, call.chosen.shape[1]
    (tokens, heads, width), tiles = q.shape, triton.cdiv(q.shape[1], ROWS)
    pieces, programs = triton.cdiv(k, PIECE), num_multiprocessors(q.device)
    splits &= pieces > 1
    items = tokens * tiles * (pieces if splits else 1)
    slots = items if splits else min(items, programs) if pieces > 1 else 0
    acc = torch.empty((slots, ROWS, call.latent), dtype=torch.float32, device=q.device)
    row_max, row_sum = (torch.empty((slots, ROWS), dtype=torch.float32, device=q.device) for _ in range(2))
    with torch.cuda.device_of(q):
        attend_gathered[(min(items, programs),)](
            _box(q, 256),
            _box(q, width - call.latent),
            pages,
            call.block_tables,
            *call.rows,
            call.chosen,
            out,
            acc,
            row_max,
            row_sum,
            call.scale * LOG2_E,
            items,
            pages.stride(0) // width,
            call.block_tables.stride(0),
            SPLITS=splits,
            PIECES=pieces,
            PIECE=PIECE,
            K=k,
            HEADS=heads,
            PAGE=pages.shape[1],
            STAGES=STAGES,
            num_warps=4,
        )
        if splits:
            attend_in_phases[(tokens * heads,)](
                q, pages, call.block_tables, *call.rows, call.chosen, out, acc, row_max, *[acc] * 2, row_sum,
                call.rows.num_keys, 0.0, 0, 0, PHASE=FOLD.value, PIECE=PIECE, K=k, HEADS=heads, PAGE=pages.shape[1],
                KEYS=64, GROUP=1, ARRIVALS=1, WARPS=1, num_warps=1, launch_pdl=True,
            )  # fmt: skip


def _box(q: torch.Tensor, columns: int) -> TensorDescriptor:
    """Boxes of a tile's heads; behind a query's last head come the next one's, whose results are not stored."""
    tokens, heads, width = q.shape
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor(q, [tokens * heads, width], [width, 1], [ROWS, columns], layout)
