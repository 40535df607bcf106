"""linear on a CPU through oneDNN, with a weight that was brought into its own layout once.

From LEAST_ROWS rows on a row's bits depend on no other row and not on how many there are: so it was for 18 shapes of 48
to 9,728 outputs and depths to 8,192, with AVX2 and AVX-512, one thread and two. torch's product of plain weights (MKL)
keeps a row's bits with AVX-512 and one thread only, and from 16 rows on; oneDNN needs no more time: 7 to 17 % less for
prompts, 40 % less for 2 rows than MKL for 16.
"""

import torch

# One row goes through another kernel, with another order of sums.
LEAST_ROWS = 2


def can_pack(weight: torch.Tensor) -> bool:
    """Returns whether oneDNN takes it here. The ops have no name in torch's public interface, so a release may lack
    them."""
    ops = torch.ops.mkldnn
    return (
        weight.device.type == "cpu"
        and weight.dtype is torch.float32
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(ops, "_reorder_linear_weight")
        and hasattr(ops, "_linear_pointwise")
    )


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Returns the weight [N, K] in oneDNN's layout: an opaque tensor of the same shape and about as many bytes."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    return packed


def linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [num_rows, K] through the packed weight: [num_rows, N]."""
    if x.shape[0] == 0:
        return x.new_empty((0, packed.shape[0]))
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x.contiguous(), packed, bias, "none", [], "")
    return out
