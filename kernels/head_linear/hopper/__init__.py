"""The fast path of head_linear on Hopper: which products it takes. They have the Triton kernel's bits."""

import torch

from kernels.backend import is_hopper

__all__ = ["FEW_HEADS", "MOST_TOKENS", "MOST_TOKENS_OF_MANY_HEADS", "reason_against", "reason_against_case"]

# Of 128 heads 16 tokens take 10.9 us into the latents' space and 11.4 out of it, in Triton 12.1 and 11.7; 64 tokens
# take 13.2 and 15.4, in Triton 14.1 and 13.4 (H200). Most is gained by overlap with other launches: a sparse layer of
# one sequence takes 48.6 us, in Triton 57.3. So is what few heads gain with more tokens: attention over latents inside
# layers of 64 sequences takes 138.8 us with 16 heads, behind the Triton kernel 141.5.
MOST_TOKENS_OF_MANY_HEADS, MOST_TOKENS, FEW_HEADS = 16, 64, 32
# Depth and columns of the matrices whose products were compared with the plain kernel's on an H200, bit by bit.
SHAPES = ((128, 512), (512, 128))
# Of a stride Triton tells a kernel only whether this number of elements divides it.
ALIGNED_ELEMENTS, ALIGNED_BYTES = 16, 16


def reason_against(x: torch.Tensor, weight: torch.Tensor) -> str | None:
    """Returns why the Gluon kernel cannot, or should not, take a checked case, or None when it can."""
    if not is_hopper(x.device):
        return f"needs a Hopper GPU, the tensors are on {x.device}"
    return reason_against_case(x, weight)


def reason_against_case(x: torch.Tensor, weight: torch.Tensor) -> str | None:
    """Returns the same for a case on any device."""
    depth, num_outputs = weight.shape[1:]
    if x.dtype is not torch.bfloat16:
        return f"{x.dtype} rows"
    most_tokens = MOST_TOKENS if x.shape[1] <= FEW_HEADS else MOST_TOKENS_OF_MANY_HEADS
    if x.shape[0] > most_tokens:
        return f"needs at most {most_tokens} tokens of {x.shape[1]} heads, got {x.shape[0]}"
    if (depth, num_outputs) not in SHAPES:
        return f"matrices of {depth} x {num_outputs}, not one of {SHAPES}"
    if 1 not in weight.stride()[1:]:
        return f"matrices with gaps, strides {weight.stride()}"
    strides = (x.stride(0), x.stride(1), weight.stride(0), max(weight.stride()[1:]))
    if any(stride % ALIGNED_ELEMENTS for stride in strides) or any(t.data_ptr() % ALIGNED_BYTES for t in (x, weight)):
        return f"rows not at multiples of {ALIGNED_ELEMENTS} elements, strides {x.stride()} and {weight.stride()}"
    return None
