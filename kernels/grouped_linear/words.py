"""mxfp4 weights in the order in which Hopper's kernel makes 16-bit values of them with the fewest instructions.

A thread of a tensor-core product holds, of each row and each 32 columns, columns 16 s + 8 h + 2 t + i for s, h, i of 0
and 1, where t is its place among four. Its eight values are one word here: those with i = 0 are in the low half, and in
each half a pair (s, h) has the same four bits, which one or two shifts take to where bfloat16 has its sign, the two low
bits of its exponent and the high one of its mantissa. The order of the files takes four times as many loads, and twice
as many operations.
"""

from typing import NamedTuple

import torch
from torch.nn import functional

from kernels._checks import check_dense
from kernels.grouped_linear.stored import MX_BLOCK, Mxfp4Experts

# In each half of a word, by 2 s + h: the bit of the sign, and the lowest bit of exponent and mantissa.
PLACES = ((15, 6), (12, 3), (14, 9), (13, 0))
# Values of a word, and exponents of one.
VALUES, EXPONENTS = 8, 4
# 2**(exponent - 1) is a number of bfloat16: with it, one product makes a weight of what lies in a word.
MAX_EXPONENT = 128


class Mxfp4Words(NamedTuple):
    """Mxfp4Experts in another order; exponents are at most MAX_EXPONENT.

    values     int32 [num_experts, N, K / 8]
    exponents  int32 [num_experts, N, ceil(K / 128)]: one of 32 columns in each byte, the first in the lowest
    """

    values: torch.Tensor
    exponents: torch.Tensor

    @property
    def shape(self) -> tuple[int, int, int]:
        experts, outputs, words = self.values.shape
        return experts, outputs, VALUES * words


def check_words(weight: Mxfp4Words, num_experts: int, device: torch.device) -> None:
    """Raises KernelArgumentError unless values and exponents belong together."""
    check_dense("weight.values", weight.values, (num_experts, None, None), (torch.int32,), device)
    _, outputs, depth = weight.shape
    words = -(-depth // (EXPONENTS * MX_BLOCK))
    check_dense("weight.exponents", weight.exponents, (num_experts, outputs, words), (torch.int32,), device)


def words_of(weight: Mxfp4Experts) -> Mxfp4Words:
    """Returns the same weights; those whose exponents are at most MAX_EXPONENT. One expert at a time: what is made in
    between takes eight times the memory of one."""
    experts, outputs, depth = weight.shape
    values = weight.values.new_empty((experts, outputs, depth // VALUES), dtype=torch.int32)
    for expert in range(experts):
        values[expert] = _words(weight.values[expert])
    missing = -weight.scales.shape[2] % EXPONENTS
    exponents = functional.pad(weight.scales, (0, missing)).contiguous().view(torch.int32)
    return Mxfp4Words(values, exponents)


def bytes_of(words: Mxfp4Words) -> Mxfp4Experts:
    """Returns what `words_of` was given."""
    experts, outputs, depth = words.shape
    values = words.values.new_empty((experts, outputs, depth // 2), dtype=torch.uint8)
    for expert in range(experts):
        values[expert] = _bytes(words.values[expert])
    return Mxfp4Experts(values, words.exponents.view(torch.uint8)[:, :, : depth // MX_BLOCK])


def _words(pairs: torch.Tensor) -> torch.Tensor:
    """Returns int32 [rows, K / 8] of bytes [rows, K / 2]."""
    # By block, s, h, t and i.
    codes = torch.stack([pairs & 15, pairs >> 4], dim=-1).view(pairs.shape[0], -1, 2, 2, 4, 2).int()
    halves = torch.zeros_like(codes[:, :, 0, 0])
    for pair, (sign, number) in enumerate(PLACES):
        code = codes[:, :, pair // 2, pair % 2]
        halves |= (code >> 3) << sign | (code & 7) << number
    return (halves[..., 0] | halves[..., 1] << 16).flatten(1)


def _bytes(words: torch.Tensor) -> torch.Tensor:
    """Returns bytes [rows, K / 2] of int32 [rows, K / 8]."""
    halves = torch.stack([words, words >> 16], dim=-1)
    codes = [(halves >> sign & 1) << 3 | halves >> number & 7 for sign, number in PLACES]
    # [rows, blocks, t, i, s, h] becomes [rows, blocks, s, h, t, i].
    by_thread = torch.stack(codes, dim=-1).view(words.shape[0], -1, 4, 2, 2, 2)
    columns = by_thread.permute(0, 1, 4, 5, 2, 3).reshape(words.shape[0], -1, 2)
    return (columns[..., 0] | columns[..., 1] << 4).to(torch.uint8)
