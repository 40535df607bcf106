"""How fast a card reads: programs that stride through a large buffer and keep one sum each.

A library's sum is no ceiling: on one H200 torch.sum read 4,422 GB/s where such a reader read
4,638.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

# (elements of a block, programs on a multiprocessor): which is fastest differs from card to card.
SHAPES = ((2048, 8), (4096, 4), (8192, 4), (8192, 2))


@triton.jit
def read_strided(source_ptr, sums_ptr, count, BLOCK: tl.constexpr):
    """`count` is a multiple of BLOCK, and fits int32."""
    place = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK, num_stages=3):
        total += tl.load(source_ptr + first + place)
    tl.store(sums_ptr + tl.program_id(0), tl.sum(total, 0))


def readers(source: torch.Tensor, multiprocessors: int) -> list[Callable[[], torch.Tensor]]:
    """Ways to read all of `source`, fp32; each returns one sum for each program."""

    def reader(block: int, programs: int) -> Callable[[], torch.Tensor]:
        sums = torch.empty(programs, device=source.device)

        def read() -> torch.Tensor:
            read_strided[(programs,)](source, sums, source.numel(), BLOCK=block, num_warps=8)
            return sums

        return read

    return [reader(block, per * multiprocessors) for block, per in SHAPES]
