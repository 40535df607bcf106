"""Launches head_linear's Gluon kernel."""

import torch
import triton

from kernels.head_linear.hopper.kernel import multiply_few_tokens

BLOCK_N = 64


def launch(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Fills out; arguments that `reason_against` has nothing against."""
    tokens, heads, width = x.shape
    depth, num_outputs = weight.shape[1:]
    blocks, carried, by_column = num_outputs // BLOCK_N, width - depth, weight.stride(1) == 1
    with torch.cuda.device_of(x):
        multiply_few_tokens[(blocks, heads)](
            x, weight, out, tokens, x.stride(0), x.stride(1), weight.stride(0), weight.stride(2 if by_column else 1),
            out.stride(0), out.stride(1), K=depth, N=num_outputs, BLOCK_N=BLOCK_N,
            TOKENS=max(triton.next_power_of_2(tokens), 8), CARRIED=carried,
            BLOCK_C=triton.next_power_of_2(max(triton.cdiv(carried, blocks), 1)), BY_COLUMN=by_column, num_warps=4,
            launch_pdl=True,
        )  # fmt: skip
