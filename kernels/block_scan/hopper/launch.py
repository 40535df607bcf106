"""Launches the Gluon scan: descriptors of a launch's rows, and compile-time constants."""

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.block_scan.call import BlockScan
from kernels.block_scan.hopper import VALUES, num_stages
from kernels.block_scan.hopper.kernel import scan_blocks
from kernels.block_scan.plan import GRID_TOKENS


def boxes_of(rows: torch.Tensor, columns: int) -> TensorDescriptor:
    """Returns boxes of GRID tokens and `columns` elements, of rows [num_tokens, ...] of which a token's are contiguous.

    What a box has behind the last token is filled with zeros.
    """
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor(
        rows, [rows.shape[0], rows[0].numel()], [rows.stride(0), 1], [GRID_TOKENS, columns], layout
    )  # fmt: skip


def launch_scan(scan: BlockScan, out: torch.Tensor) -> None:
    """Fills out, with zeros for tokens of no row, and writes the states; checked, non-empty arguments."""
    plan, slots, states = scan.plan, scan.plan.slots, scan.states
    heads, dim_v = scan.v.shape[1:]
    k_heads, dim_k = scan.k.shape[1:]
    nothing = scan.scores if scan.sums is None else scan.sums
    optional = (scan.beta, scan.weights, scan.factors, scan.skip, scan.gate, scan.remains)
    beta, weights, factors, skip, gate, remains = (nothing if tensor is None else tensor for tensor in optional)
    scores, k = boxes_of(scan.scores, GRID_TOKENS), boxes_of(scan.k, dim_k)
    with torch.cuda.device_of(out):
        scan_blocks[(plan.num_rows * heads, dim_v // VALUES)](
            boxes_of(scan.q, dim_k), k, boxes_of(scan.v, VALUES),
            scores if scan.inverses is None else boxes_of(scan.inverses, GRID_TOKENS), scores,
            k if scan.kept is None else boxes_of(scan.kept, dim_k), beta, nothing, weights, factors, skip, gate,
            remains, states, out, plan.cu_seqlens_q, plan.cu_blocks, plan.blocks, plan.leave_slot, slots.working,
            slots.restore, slots.fresh, slots.rolling, plan.num_rows, out.shape[0], scan.scale, beta.stride(0),
            gate.stride(0), states.stride(0),
            HEADS=heads, GROUP=heads // k_heads, DK=dim_k, DV=dim_v, BV=VALUES,
            HAS_INVERSES=scan.inverses is not None, HAS_WEIGHTS=scan.weights is not None,
            HAS_SKIP=scan.skip is not None, HAS_GATE=scan.gate is not None, HAS_FACTORS=scan.factors is not None,
            HAS_CHANNELS=scan.kept is not None, BY_VALUE=scan.by_value, STAGES=num_stages(scan.kept is not None),
            num_warps=4, launch_pdl=True,
        )  # fmt: skip
