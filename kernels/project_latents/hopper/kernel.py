"""project_latents in Gluon for Hopper: persistent programs, and a number of latents that lies on the device.

producer   one warp: boxes of 64 columns of latents and of the projection's rows, in a ring
consumers  two warpgroups: 64 latents each by BLOCK_N outputs, over the whole depth, then out by the copy engine while
           the next tile's boxes arrive

An output is one chain of sums over the depth in ascending order, in fp32, rounded once.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.hopper.barriers import make_barriers, thread_barrier
from kernels.hopper.launches import allow_next_launch, wait_for_last_launch

# Latents of a tile, half of them of each consumer.
BLOCK_M = gl.constexpr(128)
# Tiles of latents that run side by side, so that they find the projection's rows in the L2 cache.
GROUP_M = gl.constexpr(16)


@gluon.jit
def tiles_of(num_latents_ptr, most_latents, num_outputs, BLOCK_N: gl.constexpr):
    """Returns how many tiles of latents and of outputs there are."""
    num_latents = gl.minimum(gl.load(num_latents_ptr), most_latents)
    return (num_latents + BLOCK_M - 1) // BLOCK_M, (num_outputs + BLOCK_N - 1) // BLOCK_N


@gluon.jit
def tile_at(index, tiles_m, tiles_n, BLOCK_N: gl.constexpr):
    """Returns the first latent and the first output of a tile."""
    first_m = index // (GROUP_M * tiles_n) * GROUP_M
    group_m = gl.minimum(tiles_m - first_m, GROUP_M)
    within = index % (GROUP_M * tiles_n)
    return (first_m + within % group_m) * BLOCK_M, within // group_m * BLOCK_N


@gluon.jit
def load_boxes(
    latents_desc, weight_desc, num_latents_ptr, most_latents, num_outputs, latents, weights, full, empty,
    DEPTH: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    tiles_m, tiles_n = tiles_of(num_latents_ptr, most_latents, num_outputs, BLOCK_N)
    step = 0
    for index in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m, n = tile_at(index, tiles_m, tiles_n, BLOCK_N)
        for k in range(0, DEPTH, BLOCK_K):
            s = step % STAGES
            mbarrier.wait(empty.index(s), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(s), (BLOCK_M + BLOCK_N) * BLOCK_K * 2)
            tma.async_copy_global_to_shared(latents_desc, [m, k], full.index(s), latents.index(s))
            tma.async_copy_global_to_shared(weight_desc, [n, k], full.index(s), weights.index(s))
            step += 1


@gluon.jit
def multiply(
    out_desc, num_latents_ptr, most_latents, num_outputs, latents, weights, results, full, empty,
    PART: gl.constexpr, DEPTH: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One consumer: the PART-th 64 latents of each tile."""
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    HALF: gl.constexpr = BLOCK_M // 2
    tiles_m, tiles_n = tiles_of(num_latents_ptr, most_latents, num_outputs, BLOCK_N)
    result = results.index(PART)
    step = 0
    for index in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m, n = tile_at(index, tiles_m, tiles_n, BLOCK_N)
        acc = gl.zeros([HALF, BLOCK_N], gl.float32, L)
        for k in range(0, DEPTH, BLOCK_K):
            s = step % STAGES
            mbarrier.wait(full.index(s), (step // STAGES) & 1)
            some = latents.index(s).slice(PART * HALF, HALF, 0)
            acc = warpgroup_mma(some, weights.index(s).permute((1, 0)), acc, use_acc=k > 0, is_async=True)
            # The product before this one is done, and its boxes are free.
            acc = warpgroup_mma_wait(1, deps=[acc])
            if k > 0:
                mbarrier.arrive(empty.index((step - 1) % STAGES), count=1)
            step += 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index((step - 1) % STAGES), count=1)
        tma.store_wait(pendings=0)
        thread_barrier()
        result.store(acc.to(result.dtype))
        fence_async_shared()
        thread_barrier()
        tma.async_copy_shared_to_global(out_desc, [m + PART * HALF, n], result)
    tma.store_wait(pendings=0)


# What changes from batch to batch is not specialised on: a new value must not mean a new compilation.
@gluon.jit(
    do_not_specialize=["most_latents"],
    do_not_specialize_on_alignment=["num_latents_ptr"],
)
def project(
    latents_desc, weight_desc, out_desc, num_latents_ptr, most_latents, num_outputs,
    DEPTH: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = latents_desc.dtype
    latents = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_M, BLOCK_K], latents_desc.layout)
    weights = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, BLOCK_K], weight_desc.layout)
    results = gl.allocate_shared_memory(DTYPE, [2, BLOCK_M // 2, BLOCK_N], out_desc.layout)
    full, empty = make_barriers(STAGES, 1), make_barriers(STAGES, 2)
    allow_next_launch()
    wait_for_last_launch()
    # One expression: what passes through a variable loses its compile-time constants.
    gl.warp_specialize(
        [
            (multiply, (
                out_desc, num_latents_ptr, most_latents, num_outputs, latents, weights, results, full, empty,
                gl.constexpr(role), DEPTH, BLOCK_N, BLOCK_K, STAGES,
            ))
            if role < 2
            else (load_boxes, (
                latents_desc, weight_desc, num_latents_ptr, most_latents, num_outputs, latents, weights, full, empty,
                DEPTH, BLOCK_N, BLOCK_K, STAGES,
            ))
            for role in (0, 1, 2)
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip
