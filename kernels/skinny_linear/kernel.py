"""Gluon kernel of skinny_linear: streams the weights once, at the memory's speed.

Knows neither the model nor the library whose sums it repeats; shapes were checked before.

    weight [N, K]     one program per 64 rows of N; its tiles ride a ring of TMA stages
    x      [M, K]     rides along; the tensor cores see x transposed, so a few rows of x waste no lanes
    out    [M, N]     one chain of products in ascending K for each element, as in a plain wgmma GEMM
"""

from typing import Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

BLOCK_N = 64
BLOCK_K = 128
NUM_WARPS = 4
# Where every multiprocessor gets several tiles, shallow rings let two or three programs share it: while one starts or
# ends, the others read. Where it gets one, the ring takes what memory there is.
STAGES = 4
RING_BYTES = 200 << 10


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
def multiply_rows(
    weight_desc,
    x_desc,
    bias_ptr,
    out_ptr,
    num_rows,
    num_outputs,
    depth,
    stride_out_row,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):
    """out[m, n] of 64 outputs n and all rows m. Beyond the edges the copies bring zeros."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16])
    dtype: gl.constexpr = weight_desc.dtype
    stage_bytes: gl.constexpr = (BLOCK_N + ROWS) * BLOCK_K * 2
    first = gl.program_id(0) * BLOCK_N
    steps = (depth + BLOCK_K - 1) // BLOCK_K
    weights = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_K], weight_desc.layout)
    rows = gl.allocate_shared_memory(dtype, [STAGES, ROWS, BLOCK_K], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    # Weights are nobody's result, so they are fetched while the kernel before still runs.
    for stage in gl.static_range(STAGES):
        if stage < steps:
            mbarrier.expect(full.index(stage), stage_bytes)
            tma.async_copy_global_to_shared(
                weight_desc, [first, stage * BLOCK_K], full.index(stage), weights.index(stage)
            )
    _let_successor_start()
    _wait_for_predecessor()
    for stage in gl.static_range(STAGES):
        if stage < steps:
            tma.async_copy_global_to_shared(x_desc, [0, stage * BLOCK_K], full.index(stage), rows.index(stage))
    acc = gl.zeros([BLOCK_N, ROWS], gl.float32, layout)
    for step in range(steps):
        slot = step % STAGES
        mbarrier.wait(full.index(slot), (step // STAGES) & 1)
        token = warpgroup_mma(weights.index(slot), rows.index(slot).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[token])
        following = step + STAGES
        if following < steps:
            column = following * BLOCK_K
            mbarrier.expect(full.index(slot), stage_bytes)
            tma.async_copy_global_to_shared(weight_desc, [first, column], full.index(slot), weights.index(slot))
            tma.async_copy_global_to_shared(x_desc, [0, column], full.index(slot), rows.index(slot))
    for stage in gl.static_range(STAGES):
        mbarrier.invalidate(full.index(stage))

    n = first + gl.arange(0, BLOCK_N, gl.SliceLayout(1, layout))
    m = gl.arange(0, ROWS, gl.SliceLayout(0, layout))
    if HAS_BIAS:
        acc += gl.load(bias_ptr + n, mask=n < num_outputs, other=0.0).to(gl.float32)[:, None]
    target = out_ptr + m.to(gl.int64)[None, :] * stride_out_row + n[:, None]
    gl.store(target, acc.to(dtype), mask=(n < num_outputs)[:, None] & (m < num_rows)[None, :])


def stages_for(rows: int, tiles: int, multiprocessors: int) -> int:
    """Depth of the ring that a program of so many rows of x has."""
    return STAGES if tiles > multiprocessors else RING_BYTES // ((BLOCK_N + rows) * BLOCK_K * 2)


def launch(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    num_outputs, depth = weight.shape
    rows = max(8, triton.next_power_of_2(x.shape[0]))
    tiles = triton.cdiv(num_outputs, BLOCK_N)
    multiprocessors = torch.cuda.get_device_properties(x.device).multi_processor_count
    shared: Any = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    multiply_rows[(tiles,)](
        TensorDescriptor.from_tensor(weight, [BLOCK_N, BLOCK_K], shared),
        TensorDescriptor.from_tensor(x, [rows, BLOCK_K], shared),
        weight if bias is None else bias,
        out,
        x.shape[0],
        num_outputs,
        depth,
        out.stride(0),
        ROWS=rows,
        BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K,
        STAGES=stages_for(rows, tiles, multiprocessors),
        HAS_BIAS=bias is not None,
        num_warps=NUM_WARPS,
        launch_pdl=True,
    )
