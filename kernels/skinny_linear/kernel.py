"""Gluon kernel of skinny_linear: streams the weights once, at the memory's speed, and sums K in fixed parts.

Knows neither the model nor the phase; shapes were checked before.

    weight [N, K]     one program per 64 rows of N and PART columns of K; its tiles ride a ring of TMA stages
    x      [M, K]     rides along; the tensor cores see x transposed, so a few rows of x waste no lanes
    out    [M, N]     the last program of a tile adds the parts in ascending order, whoever finished when

What a row adds up, and in which order, is a function of N and K alone: its bits depend on no other row.
"""

from typing import Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# Triton 3.7 renamed it.
_barrier: Any = getattr(gl, "barrier", None) or gl.thread_barrier

BLOCK_N = 64
BLOCK_K = 128
NUM_WARPS = 4
GLUON_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


@gluon.jit
def _wait_for_predecessor():
    """With programmatic dependent launch: until the kernel before has finished and its writes can be seen."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _let_successor_start():
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def multiply_part(
    weight_desc,
    x_desc,
    bias_ptr,
    out_ptr,
    partials_ptr,
    counters_ptr,
    num_rows,
    num_outputs,
    depth,
    stride_out_row,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    PART: gl.constexpr,
    NUM_PARTS: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):
    """out[m, n] of 64 outputs n, over one part of K; the last part to arrive writes them."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16])
    part = gl.program_id(0)
    tile = gl.program_id(1)
    first = part * PART
    steps = (gl.minimum(depth - first, PART) + BLOCK_K - 1) // BLOCK_K
    dtype: gl.constexpr = weight_desc.dtype
    weights = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_K], weight_desc.layout)
    rows = gl.allocate_shared_memory(dtype, [STAGES, ROWS, BLOCK_K], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    # Weights are nobody's result, so they are fetched while the kernel before still runs.
    for stage in gl.static_range(STAGES):
        if stage < steps:
            mbarrier.expect(full.index(stage), (BLOCK_N + ROWS) * BLOCK_K * 2)
            tma.async_copy_global_to_shared(
                weight_desc, [tile * BLOCK_N, first + stage * BLOCK_K], full.index(stage), weights.index(stage)
            )
    _let_successor_start()
    _wait_for_predecessor()
    for stage in gl.static_range(STAGES):
        if stage < steps:
            tma.async_copy_global_to_shared(x_desc, [0, first + stage * BLOCK_K], full.index(stage), rows.index(stage))
    acc = gl.zeros([BLOCK_N, ROWS], gl.float32, layout)
    for step in range(steps):
        slot = step % STAGES
        mbarrier.wait(full.index(slot), (step // STAGES) & 1)
        token = warpgroup_mma(weights.index(slot), rows.index(slot).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[token])
        following = step + STAGES
        if following < steps:
            column = first + following * BLOCK_K
            mbarrier.expect(full.index(slot), (BLOCK_N + ROWS) * BLOCK_K * 2)
            tma.async_copy_global_to_shared(
                weight_desc, [tile * BLOCK_N, column], full.index(slot), weights.index(slot)
            )
            tma.async_copy_global_to_shared(x_desc, [0, column], full.index(slot), rows.index(slot))
    for stage in gl.static_range(STAGES):
        mbarrier.invalidate(full.index(stage))

    n = gl.arange(0, BLOCK_N, gl.SliceLayout(1, layout))
    m = gl.arange(0, ROWS, gl.SliceLayout(0, layout))
    if NUM_PARTS > 1:
        place = n[:, None] * ROWS + m[None, :]
        mine = partials_ptr + (tile * NUM_PARTS + part).to(gl.int64) * (BLOCK_N * ROWS)
        gl.store(mine + place, acc)
        _barrier()
        arrived = gl.atomic_add(counters_ptr + tile, 1, sem="acq_rel", scope="gpu")
        if arrived == NUM_PARTS - 1:
            gl.store(counters_ptr + tile, 0)
            acc = gl.zeros([BLOCK_N, ROWS], gl.float32, layout)
            for other in range(NUM_PARTS):
                theirs = partials_ptr + (tile * NUM_PARTS + other).to(gl.int64) * (BLOCK_N * ROWS)
                acc += gl.load(theirs + place, cache_modifier=".cg")
            _store(acc, tile, bias_ptr, out_ptr, num_rows, num_outputs, stride_out_row, n, m, BLOCK_N, HAS_BIAS)
    else:
        _store(acc, tile, bias_ptr, out_ptr, num_rows, num_outputs, stride_out_row, n, m, BLOCK_N, HAS_BIAS)


@gluon.jit
def _store(
    acc, tile, bias_ptr, out_ptr, num_rows, num_outputs, stride_out_row, n, m,
    BLOCK_N: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    outputs = tile * BLOCK_N + n
    if HAS_BIAS:
        acc += gl.load(bias_ptr + outputs, mask=outputs < num_outputs, other=0.0).to(gl.float32)[:, None]
    target = out_ptr + m.to(gl.int64)[None, :] * stride_out_row + outputs[:, None]
    inside = (outputs < num_outputs)[:, None] & (m < num_rows)[None, :]
    gl.store(target, acc.to(out_ptr.dtype.element_ty), mask=inside)


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    counters: torch.Tensor,
    out: torch.Tensor,
    part: int,
    rows: int,
    stages: int,
) -> None:
    """`rows` bounds x's rows (a power of two from 8 on); `part` is the columns of K that one program adds up."""
    num_outputs, depth = weight.shape
    shared = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    num_parts = triton.cdiv(depth, part)
    tiles = triton.cdiv(num_outputs, BLOCK_N)
    partials = x.new_empty(tiles * num_parts * BLOCK_N * rows if num_parts > 1 else 0, dtype=torch.float32)
    multiply_part[(num_parts, tiles)](
        TensorDescriptor.from_tensor(weight, [BLOCK_N, BLOCK_K], shared),
        TensorDescriptor.from_tensor(x, [rows, BLOCK_K], shared),
        weight if bias is None else bias,
        out,
        partials,
        counters,
        x.shape[0],
        num_outputs,
        depth,
        out.stride(0),
        ROWS=rows,
        BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K,
        PART=part,
        NUM_PARTS=num_parts,
        STAGES=stages,
        HAS_BIAS=bias is not None,
        num_warps=NUM_WARPS,
        launch_pdl=True,
    )
