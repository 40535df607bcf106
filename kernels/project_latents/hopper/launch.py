"""Launches project_latents' Gluon kernel."""

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.device import num_multiprocessors
from kernels.project_latents.hopper import BLOCK_K
from kernels.project_latents.hopper.kernel import BLOCK_M, project

# On an H200 keys and values of 4,608 latents for 128 heads take 239 us, with 256 outputs a tile and three stages 245;
# the library takes 231, and 414 for the 8,192 that the launch was captured for. Of 32,768: 1,813, 1,848 and 1,915.
BLOCK_N, STAGES = 128, 5

_SHARED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def launch(latents: torch.Tensor, kv_b: torch.Tensor, num_latents: torch.Tensor, out: torch.Tensor) -> None:
    """Fills the first num_latents rows of out, rounded up to whole tiles; arguments that `reason_against` has nothing
    against."""
    (num_outputs, depth), rows = kv_b.shape, latents.shape[0]
    with torch.cuda.device_of(latents):
        project[(num_multiprocessors(latents.device),)](
            _boxes(latents[:, :depth], BLOCK_M.value, BLOCK_K),
            _boxes(kv_b, BLOCK_N, BLOCK_K),
            _boxes(out, BLOCK_M.value // 2, BLOCK_N),
            num_latents,
            rows,
            num_outputs,
            DEPTH=depth,
            BLOCK_N=BLOCK_N,
            BLOCK_K=BLOCK_K,
            STAGES=STAGES,
            num_warps=4,
            launch_pdl=True,
        )


def _boxes(matrix: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Boxes of a matrix; what lies beyond it is read as zeros, and not written."""
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns], _SHARED)
