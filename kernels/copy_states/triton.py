"""copy_states in Triton: pure traffic in the widest words that fit, one program for one run of a state in one layer."""

import torch
import triton
import triton.language as tl

from kernels.byte_planes import widest_word
from kernels.launches import allow_next_launch_and_wait, overlap_options

# Words of a program; a state's runs are neighbours in launch order, which keeps DRAM pages open. On an H200 64 states
# of 2 MiB take 70.7 us, with 1,024 words 72.9.
WORDS = 512
NUM_WARPS = 4


@triton.jit
def copy_words(
    planes_ptr, sources_ptr, destinations_ptr, words, stride_plane, WORDS: tl.constexpr, OVERLAPS: tl.constexpr
):
    allow_next_launch_and_wait(OVERLAPS)
    runs = tl.cdiv(words, WORDS)
    pair = tl.program_id(0) // runs
    word = (tl.program_id(0) % runs).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    source = tl.load(sources_ptr + pair).to(tl.int64)
    destination = tl.load(destinations_ptr + pair).to(tl.int64)
    ok = (word < words) & (source > 0) & (destination > 0)
    plane = planes_ptr + tl.program_id(1).to(tl.int64) * stride_plane
    tl.store(plane + destination * words + word, tl.load(plane + source * words + word, mask=ok, other=0), mask=ok)


def launch(planes: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor) -> None:
    """Copies; checked, non-empty arguments."""
    paged = planes.view(widest_word(planes))
    words = paged.shape[2]
    block = min(WORDS, triton.next_power_of_2(words))
    grid = (sources.shape[0] * triton.cdiv(words, block), paged.shape[0])
    with torch.cuda.device_of(planes):
        copy_words[grid](
            paged, sources, destinations, words, paged.stride(0),
            WORDS=block, num_warps=NUM_WARPS, **overlap_options(planes.device),
        )  # fmt: skip
