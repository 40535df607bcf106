"""Stored weights in the order in which Hopper's kernel makes 16-bit values of them with the fewest instructions.

A thread of a tensor-core product holds, of each row and each 16 columns, columns 8 h + 2 t + i for h and i of 0 and 1,
where t is its place among four. What it holds of one or two such groups is a word here, with i = 0 in its low half.

mxfp4: a word has a thread's eight values of 32 columns, 16 s + 8 h + 2 t + i. In each half a pair (s, h) has the same
four bits, which one or two shifts take to where bfloat16 has its sign, the two low bits of its exponent and the high
one of its mantissa. The order of the files takes four times as many loads, and twice as many operations.

fp8: a word has a thread's four values of 16 columns. One mask takes the two with h = 0, a rotation, a shift and two
masks those with h = 1, to where bfloat16 has the four low bits of its exponent and the three high ones of its mantissa:
a number 2**120 times as small, which its factor makes the weight (`factors`). The order of the files has four times as
many loads, and a conversion to fp16 and one to fp32 of each value.

Words lie in blocks of 128 rows by 128 columns: a program reads such a block, or half of its rows, a step, and memory
gives it 5 to 8 % faster than as many pieces of rows that are far apart.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn import functional

from kernels._checks import check_dense
from kernels.errors import KernelArgumentError
from kernels.grouped_linear.factors import factors_of
from kernels.grouped_linear.stored import MX_BLOCK, Fp8Experts, Mxfp4Experts, StoredExperts

# In each half of a word, by 2 s + h: the bit of the sign, and the lowest bit of exponent and mantissa.
PLACES = ((15, 6), (12, 3), (14, 9), (13, 0))
# Of mxfp4: values of a word, and exponents of one.
VALUES, EXPONENTS = 8, 4
# Rows and columns of a block.
BLOCK = 128
# Bytes of experts that are put in order at once: one expert at a time would be 20 launches for each of Qwen3-Next's
# 49,000 matrices.
SLICE_BYTES = 2**24
# 2**(exponent - 1) is a number of bfloat16: with it, one product makes a weight of what lies in a word.
MAX_EXPONENT = 128
# Of fp8: values of a word, and columns of the four words that threads take together.
FP8_VALUES, FP8_GROUP = 4, 16


class Mxfp4Words(NamedTuple):
    """Mxfp4Experts in another order; exponents are at most MAX_EXPONENT.

    values     int32 [num_experts, ceil(N / 128), ceil(K / 128), 128, 16]: zeros beyond the last row or column
    exponents  int32 [num_experts, N, ceil(K / 128)]: one of 32 columns in each byte, the first in the lowest
    shape      num_experts, N and K
    """

    values: torch.Tensor
    exponents: torch.Tensor
    shape: tuple[int, int, int]


class Fp8Words(NamedTuple):
    """Fp8Experts in another order; no value is NaN, and K is a multiple of FP8_GROUP.

    values   int32 [num_experts, ceil(N / 128), ceil(K / 128), 128, 32]: zeros beyond the last row or column
    factors  [num_experts, ceil(N / 128), ceil(K / 128)]: of FP8_RAISED times each scale, the head in both halves of an
             int32; or, where one has a rest, int64 with those of the rest above
    shape    num_experts, N and K
    scales   those of Fp8Experts
    """

    values: torch.Tensor
    factors: torch.Tensor
    shape: tuple[int, int, int]
    scales: torch.Tensor


ExpertWords = Fp8Words | Mxfp4Words


def check_words(weight: ExpertWords, num_experts: int, device: torch.device) -> None:
    """Raises KernelArgumentError unless values belong together with exponents or factors."""
    experts, outputs, depth = weight.shape
    if experts != num_experts:
        raise KernelArgumentError(f"weight.shape: must be of {num_experts} experts, got {experts}")
    blocks = num_experts, -(-outputs // BLOCK), -(-depth // BLOCK)
    width = BLOCK // (VALUES if isinstance(weight, Mxfp4Words) else FP8_VALUES)
    check_dense("weight.values", weight.values, (*blocks, BLOCK, width), (torch.int32,), device)
    if isinstance(weight, Mxfp4Words):
        exponents = num_experts, outputs, -(-depth // (EXPONENTS * MX_BLOCK))
        check_dense("weight.exponents", weight.exponents, exponents, (torch.int32,), device)
        return
    check_dense("weight.factors", weight.factors, blocks, (torch.int32, torch.int64), device)
    check_dense("weight.scales", weight.scales, blocks, (torch.float32,), device)


def words_of(weight: StoredExperts) -> ExpertWords | None:
    """Returns the same weights, or None if no words stand for them.

    A few experts at a time: what is made in between takes up to 16 times the memory of these (mxfp4; fp8 9 times). It
    waits for the device.
    """
    if not weight.values.numel():
        return None
    return _words_of_fp8(weight) if isinstance(weight, Fp8Experts) else _words_of_mxfp4(weight)


def _words_of_fp8(weight: Fp8Experts) -> Fp8Words | None:
    scales = weight.scales.contiguous()
    factors = factors_of(scales)
    # The kernel would make 480 of a NaN. A few experts at a time: no mask of all, and one answer to wait for.
    if factors is None or weight.shape[2] % FP8_GROUP:
        return None
    if torch.stack([_has_nan(some) for some in _slices(weight.values)]).any():
        return None
    return Fp8Words(_blocks_of(weight, FP8_VALUES, _fp8_words), factors, weight.shape, scales)


def _has_nan(values: torch.Tensor) -> torch.Tensor:
    """Returns whether a byte of e4m3 is 0x7f or 0xff."""
    return (values.view(torch.uint8) & 0x7F == 0x7F).any()


def _words_of_mxfp4(weight: Mxfp4Experts) -> Mxfp4Words | None:
    if int(weight.scales.max()) > MAX_EXPONENT:
        return None
    missing = -weight.scales.shape[2] % EXPONENTS
    exponents = functional.pad(weight.scales, (0, missing)).contiguous().view(torch.int32)
    return Mxfp4Words(_blocks_of(weight, VALUES, _words), exponents, weight.shape)


def bytes_of(words: ExpertWords) -> StoredExperts:
    """Returns what `words_of` was given."""
    depth = words.shape[2]
    if isinstance(words, Fp8Words):
        values = _rows_of(words, depth, _fp8_bytes)
        return Fp8Experts(values.view(torch.float8_e4m3fn), words.scales)
    exponents = words.exponents.view(torch.uint8)[:, :, : depth // MX_BLOCK]
    return Mxfp4Experts(_rows_of(words, depth // 2, _bytes), exponents)


def _blocks_of(
    weight: StoredExperts, values_of_word: int, words_of_rows: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Returns the words of all experts in blocks; `words_of_rows` takes [rows, any]."""
    experts, outputs, depth = weight.shape
    rows, columns, width = -(-outputs // BLOCK), -(-depth // BLOCK), BLOCK // values_of_word
    out = weight.values.new_empty((experts, rows, columns, BLOCK, width), dtype=torch.int32)
    first = 0
    for some in _slices(weight.values):
        words = words_of_rows(some.flatten(0, 1)).view(len(some), outputs, -1)
        missing = (0, columns * width - words.shape[2], 0, rows * BLOCK - outputs)
        blocks = functional.pad(words, missing).view(len(some), rows, BLOCK, columns, width)
        out[first : first + len(some)] = blocks.transpose(2, 3)
        first += len(some)
    return out


def _rows_of(
    words: ExpertWords, num_bytes: int, bytes_of_words: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Returns the bytes [num_experts, N, num_bytes] that `_blocks_of` was given."""
    experts, outputs, _ = words.shape
    out = words.values.new_empty((experts, outputs, num_bytes), dtype=torch.uint8)
    for expert in range(experts):
        rows = words.values[expert].transpose(1, 2).flatten(2).flatten(0, 1)
        out[expert] = bytes_of_words(rows)[:outputs, :num_bytes]
    return out


def _slices(values: torch.Tensor) -> list[torch.Tensor]:
    """Returns the values of a few experts each, SLICE_BYTES or those of one."""
    return list(torch.split(values, max(1, SLICE_BYTES // values[0].nbytes)))


def _fp8_words(values: torch.Tensor) -> torch.Tensor:
    """Returns int32 [rows, K / 4] of e4m3 [rows, K].

    Of a half, bit 15 and 10..4 are the value with h = 0. Of that with h = 1 the exponent is in 14..11 and the mantissa
    in 2..0; its sign is bit 3 of the other half, since a rotation to the right by 4 takes it, too, to where it is
    wanted.
    """
    # By group, h, t and i.
    codes = values.view(torch.uint8).view(values.shape[0], -1, 2, 4, 2).int()
    first, second = codes[:, :, 0], codes[:, :, 1]
    halves = first << 8 & 0x8000 | first << 4 & 0x07F0 | second << 8 & 0x7800 | second & 7
    halves |= second.flip(-1) >> 4 & 8
    return (halves[..., 0] | halves[..., 1] << 16).flatten(1)


def _fp8_bytes(words: torch.Tensor) -> torch.Tensor:
    """Returns bytes [rows, K] of int32 [rows, K / 4]."""
    halves = torch.stack([words, words >> 16], dim=-1).view(words.shape[0], -1, 4, 2)
    first = halves >> 8 & 0x80 | halves >> 4 & 0x7F
    second = halves.flip(-1) << 4 & 0x80 | halves >> 8 & 0x78 | halves & 7
    return torch.stack([first, second], dim=2).flatten(1).to(torch.uint8)


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
