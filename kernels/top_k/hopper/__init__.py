"""The fast path of top_k on Hopper: which cases it takes. What is chosen is the same on every path."""

import torch

from kernels.backend import is_hopper

__all__ = ["HELD", "MAX_K", "held_of", "reason_against", "reason_against_case"]

# Most logits of a row that are kept for a choice.
HELD = 8192
MAX_K = HELD // 2


def held_of(k: int) -> int:
    """Returns the most logits of a row that may be kept for a choice of up to k."""
    return min(max(4 << (k - 1).bit_length(), 4096), HELD)


def reason_against(logits: torch.Tensor, k: int) -> str | None:
    """Returns why the Gluon kernels cannot, or should not, take a checked case, or None."""
    if not is_hopper(logits.device):
        return f"needs a Hopper GPU, the tensors are on {logits.device}"
    return reason_against_case(logits, k)


def reason_against_case(logits: torch.Tensor, k: int) -> str | None:
    """The same, whatever the device."""
    width = logits.shape[1]
    if k > MAX_K:
        return f"k is at most {MAX_K}, got {k}"
    if width <= MAX_K:
        return f"rows of {width} logits are soon chosen from"
    return None
