"""Experts' weights as checkpoints store them, and what they stand for: values times factors in fp32, rounded once.

fp8 is what DeepSeek V3 is published in, mxfp4 what gpt-oss and DeepSeek V4's experts are: a half and about a quarter of
the bytes of bf16.
"""

from typing import NamedTuple

import torch

from kernels._checks import check_rows, check_tensor
from kernels.errors import KernelArgumentError

# Rows and columns with one factor.
FP8_BLOCK = 128
# Columns with one factor, by OCP Microscaling Formats 1.0.
MX_BLOCK = 32
# Of e2m1, by its three low bits; the fourth is the sign.
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Fp8Experts(NamedTuple):
    """Weights [num_experts, N, K] as e4m3 with a factor for each block of 128 x 128, the last ones cut short.

    values  float8_e4m3fn [num_experts, N, K]
    scales  float32 [num_experts, ceil(N / 128), ceil(K / 128)]
    """

    values: torch.Tensor
    scales: torch.Tensor

    @property
    def shape(self) -> tuple[int, int, int]:
        experts, outputs, depth = self.values.shape
        return experts, outputs, depth


class Mxfp4Experts(NamedTuple):
    """Weights [num_experts, N, K] as e2m1 with a power of two for each 32 columns of a row.

    values  uint8 [num_experts, N, K / 2]: two values a byte, the first in the low half
    scales  uint8 [num_experts, N, K / 32]: exponents, counted from -127; 255 is not a number
    """

    values: torch.Tensor
    scales: torch.Tensor

    @property
    def shape(self) -> tuple[int, int, int]:
        experts, outputs, columns = self.values.shape
        return experts, outputs, 2 * columns


StoredExperts = Fp8Experts | Mxfp4Experts


def check_stored(weight: StoredExperts, num_experts: int | None, device: torch.device) -> None:
    """Raises KernelArgumentError unless values and scales belong together; their rows may be slices of wider ones."""
    is_fp8 = isinstance(weight, Fp8Experts)
    dtypes = (torch.float8_e4m3fn, torch.float32) if is_fp8 else (torch.uint8, torch.uint8)
    check_tensor("weight.values", weight.values, (num_experts, None, None), dtypes[:1], device)
    experts, outputs, depth = weight.shape
    if is_fp8:
        blocks = -(-outputs // FP8_BLOCK), -(-depth // FP8_BLOCK)
    elif depth % MX_BLOCK:
        raise KernelArgumentError(f"weight.values: rows must be whole blocks of {MX_BLOCK}, got {depth} values")
    else:
        blocks = outputs, depth // MX_BLOCK
    check_tensor("weight.scales", weight.scales, (experts, *blocks), dtypes[1:], device)
    check_rows("weight.values", weight.values)
    check_rows("weight.scales", weight.scales)


def dequantised(weight: StoredExperts, dtype: torch.dtype) -> torch.Tensor:
    """Returns [num_experts, N, K]. One expert at a time: the fp32 values in between take the memory of one."""
    check_stored(weight, None, weight.values.device)
    out = torch.empty(weight.shape, dtype=dtype, device=weight.values.device)
    for expert in range(out.shape[0]):
        out[expert] = expert_values(weight, expert)
    return out


def expert_values(weight: StoredExperts, expert: int) -> torch.Tensor:
    """Returns one expert's weights [N, K] in fp32, not rounded yet."""
    values, scales = weight.values[expert], weight.scales[expert]
    return (
        fp8_values(values, scales, (FP8_BLOCK, FP8_BLOCK))
        if isinstance(weight, Fp8Experts)
        else mxfp4_values(values, scales)
    )


def fp8_values(values: torch.Tensor, factors: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Returns fp32 [rows, columns] of e4m3 values and fp32 factors for blocks of this many rows and columns."""
    wide, (block_rows, block_columns) = values.float(), block
    of_column = factors.repeat_interleave(block_columns, dim=1)[:, : wide.shape[1]]
    whole, columns = wide.shape[0] // block_rows, wide.shape[1]
    cut = whole * block_rows
    wide[:cut].view(whole, block_rows, columns).mul_(of_column[:whole].unsqueeze(1))
    if cut < wide.shape[0]:
        wide[cut:].mul_(of_column[-1])
    return wide


def mxfp4_values(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Returns fp32 [rows, columns] of bytes [rows, columns / 2] and exponents [rows, columns / 32]."""
    pairs = _pairs_of_e2m1(values.device)[values.int()].view(*scales.shape, MX_BLOCK)
    return pairs.mul_(powers_of_two(scales).unsqueeze(-1)).flatten(1)


def powers_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """Returns in fp32 what bytes stand for that count exponents from -127."""
    return exponents.view(torch.float8_e8m0fnu).float()


def _pairs_of_e2m1(device: torch.device) -> torch.Tensor:
    """Returns the two values of each byte, fp32 [256, 2]."""
    values = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)], device=device)
    byte = torch.arange(256, device=device)
    return torch.stack([values[byte & 15], values[byte >> 4]], dim=1)
