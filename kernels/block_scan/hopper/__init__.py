"""The fast path of scans on Hopper: which cases it takes. `kernel` holds the Gluon kernel, `launch` its launcher.

The choice follows from a model's sizes and dtypes, so it never changes from launch to launch.
"""

import torch

from kernels.backend import is_hopper

__all__ = ["DIM_K", "VALUES", "num_stages", "reason_against", "reason_against_case"]

# The one size of keys: with 256 neither the state nor what a block adds to it would leave room in the registers.
DIM_K = 128
# Values of a program: one warp group's 64 rows of a product.
VALUES = 64


def num_stages(by_channel: bool) -> int:
    """Returns how many blocks are in shared memory at once; with a decay for each key channel there is more of each."""
    return 2 if by_channel else 3


def reason_against(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
    """Returns why the Gluon kernel cannot scan checked rows of heads, or None when it can."""
    if not is_hopper(v.device):
        return f"needs a Hopper GPU, the tensors are on {v.device}"
    return reason_against_case(q, k, v)


def reason_against_case(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
    """The same, whatever the device."""
    if v.dtype not in (torch.bfloat16, torch.float16):
        return f"{v.dtype} values"
    if k.shape[2] != DIM_K:
        return f"keys of {k.shape[2]} elements, not {DIM_K}"
    if v.shape[2] % VALUES:
        return f"values of {v.shape[2]} elements, no multiple of {VALUES}"
    for name, rows in (("queries", q), ("keys", k), ("values", v)):
        # What the copy engine cannot address.
        if rows.data_ptr() % 16 or rows.stride(0) % 8:
            return f"{name} not aligned to 16 bytes, strides {rows.stride()}"
    return None
