"""Launches mla_decode's Gluon kernels: descriptors of queries and pages, the attention, and a fold behind it."""

from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.mla_decode.call import MlaDecodeCall
from kernels.mla_decode.hopper import WIDTH
from kernels.mla_decode.hopper.apart import launch_apart
from kernels.mla_decode.hopper.few_kernel import attend_latents_few
from kernels.mla_decode.hopper.few_runs_kernel import attend_few_runs
from kernels.mla_decode.hopper.fold import fold
from kernels.mla_decode.hopper.fold_cuts import fold as fold_by_load
from kernels.mla_decode.hopper.kernel import attend_latents
from kernels.mla_decode.hopper.runs_kernel import attend_runs
from kernels.mla_decode.plan import MlaDecodePlan
from kernels.mla_decode.tree_sizes import TILE
from kernels.softmax import LOG2_E

STAGES = 2
# With two groups of warps the compiler would give a thread 256 at entry, one more than there are.
ENTRY_REGISTERS = 168


def launch(call: MlaDecodeCall, plan: MlaDecodePlan | None, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Launches over checked, non-empty arguments and a prepared plan (None: one of its own is made)."""
    q, pages, block_tables = call.q, call.pages, call.block_tables
    tokens, heads, _ = q.shape
    several = call.cu_seqlens_q is not None
    max_q_tokens = call.max_q_tokens if several else None
    if plan is None:
        plan = MlaDecodePlan(call.num_seqs, call.max_seqlen_k, heads, max_q_tokens=max_q_tokens, device=q.device)
        plan.prepare(call.seqlens_k, call.cu_seqlens_q)
    descs = _descriptors(q, pages, plan.rows)
    together = plan.folds_together(call.num_seqs)
    with torch.cuda.device(q.device):
        if plan.has_weights_apart(call.num_seqs):
            launch_apart(call, plan, descs, out, lse)
            fold(plan, call.num_seqs, out, lse)
            return
        kernel, lists, options = _kernel_of(plan, call.num_seqs, several, together)
        if kernel is attend_few_runs:
            descs = (*descs, _parts_of(plan))
        kernel[(plan.programs,)](
            *descs,
            out,
            lse if lse is not None else lists[1],
            *lists,
            block_tables,
            call.scale * LOG2_E,
            tokens,
            pages.stride(0) // WIDTH,
            block_tables.stride(0),
            HEADS=heads,
            PAGE=pages.shape[1],
            TILE=TILE,
            STAGES=STAGES,
            WANTS_LSE=lse is not None,
            num_warps=4,
            **options,
        )
        if plan.by_load and not together:
            fold_by_load(plan, call.num_seqs, out, lse)
        elif not plan.by_load:
            fold(plan, call.num_seqs, out, lse)


def _descriptors(q: torch.Tensor, pages: torch.Tensor, q_rows: int) -> tuple[TensorDescriptor, ...]:
    """Returns those of q_rows queries' halves and rotary parts, and of latents': a page's at a time, or a tile's."""
    page_tokens, page_rows = pages.shape[1], pages.stride(0) // WIDTH
    box, rows = min(page_tokens, TILE), (pages.shape[0] - 1) * page_rows + page_tokens
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)

    def boxes(tensor: torch.Tensor, count: int, height: int, width: int) -> TensorDescriptor:
        return TensorDescriptor(tensor, [count, WIDTH], [WIDTH, 1], [height, width], layout)

    queries = q.shape[0] * q.shape[1]
    return (
        boxes(q, queries, q_rows, 256),
        boxes(q, queries, q_rows, 64),
        boxes(pages, rows, box, 256),
        boxes(pages, rows, box, 64),
    )


def _parts_of(plan: MlaDecodePlan) -> TensorDescriptor:
    """Returns that of parts: 256 columns, and a tile's rows, of which a part has the first."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    return TensorDescriptor(plan.parts, list(plan.parts.shape), list(plan.parts.stride()), [1, TILE, 256], layout)


def _kernel_of(
    plan: MlaDecodePlan, num_seqs: int, several: bool, together: bool
) -> tuple[Any, tuple[torch.Tensor, ...], dict[str, int]]:
    """Returns a plan's kernel, the buffers that it takes, and what it is compiled for."""
    options: dict[str, int] = {"maxnreg": ENTRY_REGISTERS} if plan.transposed else {"MULTI": several}
    if plan.by_load:
        options |= {"SLOT_ROWS": plan.slot_rows, "TOGETHER": together}
        runs = (plan.parts, plan.levels, plan.items, plan.firsts, plan.counts, plan.shared, plan.arrivals)
        if plan.transposed:
            options |= {"ROWS": plan.rows, "EARLY": plan.begins_early(num_seqs), "launch_pdl": together}
            return attend_few_runs, (*runs, plan.stored), options
        return attend_runs, runs, options | {"launch_cooperative_grid": together}  # see grid_barrier
    options |= {"LEAF": plan.tree.leaf, "SHORT": plan.tree.short or 0}
    parts = (plan.acc, plan.row_max, plan.row_sum)
    if plan.transposed:
        options |= {"LEAVES_PER_GROUP": plan.tree.leaves_per_group}
        return attend_latents_few, (*parts, plan.sums, plan.items, plan.counts, plan.drawn), options
    leaves = (*parts, plan.nodes, plan.sums, plan.items, plan.counts, plan.drawn)
    return attend_latents, leaves, options | {"SLOT_ROWS": plan.slot_rows}
