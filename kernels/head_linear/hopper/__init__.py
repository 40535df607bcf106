"""The fast path of head_linear on Hopper: which products it takes. They have the Triton kernel's bits."""

import torch

from kernels.backend import is_hopper

__all__ = ["MOST_TOKENS", "reason_against", "reason_against_case"]

# Of 128 heads 16 tokens take 10.9 us into the latents' space and 11.4 out of it, in Triton 12.1 and 11.7; 64 tokens
# take 13.2 and 15.4, in Triton 14.1 and 13.4 (H200). Overlap with other launches is what is gained most: a sparse layer
# of one sequence takes 48.6 us, in Triton 57.3.
MOST_TOKENS = 16
# Columns and depth of a tile.
TILE = 64
# A program holds all of the depth.
MOST_DEPTH = 1024
ALIGNED_BYTES = 16


def reason_against(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> str | None:
    """Returns why the Gluon kernel cannot, or should not, take a checked case, or None when it can."""
    if not is_hopper(x.device):
        return f"needs a Hopper GPU, the tensors are on {x.device}"
    return reason_against_case(x, weight, out)


def reason_against_case(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> str | None:
    """The same, whatever the device."""
    depth, num_outputs = weight.shape[1:]
    if x.dtype is not torch.bfloat16:
        return f"{x.dtype} rows"
    if x.shape[0] > MOST_TOKENS:
        return f"needs at most {MOST_TOKENS} tokens, got {x.shape[0]}"
    if depth % TILE or num_outputs % TILE or depth > MOST_DEPTH:
        return f"matrices of {depth} x {num_outputs}, not of multiples of {TILE} and at most {MOST_DEPTH} deep"
    if 1 not in weight.stride()[1:]:
        return f"matrices with gaps, strides {weight.stride()}"
    for name, tensor in (("x", x), ("weight", weight), ("out", out)):
        strides = [stride for stride in tensor.stride() if stride != 1]
        if tensor.data_ptr() % ALIGNED_BYTES or any(s * tensor.element_size() % ALIGNED_BYTES for s in strides):
            return f"{name} not aligned to {ALIGNED_BYTES} bytes, strides {tensor.stride()}"
    return None
