"""pack_pages and unpack_pages in Triton: pure traffic in the widest words that fit.

One program moves one chunk of 2 KiB; a page's chunks are neighbours in launch order, which is what keeps DRAM pages
open.
"""

import torch
import triton
import triton.language as tl

from kernels.byte_planes import widest_word

WORDS = 256
# Enough to fill a host link; more would only keep multiprocessors from the work that runs beside it, which even these
# few delay: who serves meanwhile packs on the device and leaves the link to a copy engine.
HOST_PROGRAMS = 32
HOST_WARPS = 4
HOST_WORDS = 1024


@triton.jit
def move_chunk(
    chunk,
    plane,
    planes_ptr,
    packed_ptr,
    ids_ptr,
    words,
    stride_plane,
    stride_page,
    stride_row,
    PACK: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Chunk number `chunk` of one plane of all pages."""
    chunks = tl.cdiv(words, WORDS)
    row = (chunk // chunks).to(tl.int64)
    word = (chunk % chunks) * WORDS + tl.arange(0, WORDS)
    page = tl.load(ids_ptr + row).to(tl.int64)
    ok = word < words
    paged = planes_ptr + plane.to(tl.int64) * stride_plane + page * stride_page + word
    dense = packed_ptr + row * stride_row + plane.to(tl.int64) * words + word
    if PACK:
        tl.store(dense, tl.load(paged, mask=ok), mask=ok)
    else:
        tl.store(paged, tl.load(dense, mask=ok), mask=ok)


@triton.jit
def move_words(
    planes_ptr,
    packed_ptr,
    ids_ptr,
    words,
    stride_plane,
    stride_page,
    stride_row,
    PACK: tl.constexpr,
    WORDS: tl.constexpr,
):
    chunk, plane = tl.program_id(0), tl.program_id(1)
    move_chunk(chunk, plane, planes_ptr, packed_ptr, ids_ptr, words, stride_plane, stride_page, stride_row, PACK, WORDS)


# What changes from call to call is not specialised on: a new value must not mean a new compilation.
@triton.jit(do_not_specialize=["num_chunks"])
def move_words_in_turn(
    planes_ptr,
    packed_ptr,
    ids_ptr,
    num_chunks,
    planes,
    words,
    stride_plane,
    stride_page,
    stride_row,
    PACK: tl.constexpr,
    WORDS: tl.constexpr,
):
    """The same by few programs: a page's planes one after the other, so that its row fills from the front."""
    chunks = tl.cdiv(words, WORDS)
    for turn in range(tl.program_id(0), num_chunks, tl.num_programs(0)):
        chunk = turn % chunks + turn // (chunks * planes) * chunks
        plane = turn // chunks % planes
        move_chunk(
            chunk, plane, planes_ptr, packed_ptr, ids_ptr, words, stride_plane, stride_page, stride_row, PACK, WORDS
        )


def launch(planes: torch.Tensor, page_ids: torch.Tensor, packed: torch.Tensor, *, pack: bool, on_host: bool) -> None:
    """packed[i, plane] = planes[plane, page_ids[i]], or the inverse; checked, non-empty arguments.

    on_host: the packed rows are in pinned host memory, which few programs fill or read.
    """
    word_type = widest_word(planes, packed)
    paged, dense = planes.view(word_type), packed.view(word_type)
    words = paged.shape[2]
    block = min(HOST_WORDS if on_host else WORDS, triton.next_power_of_2(words))
    chunks = packed.shape[0] * triton.cdiv(words, block)
    sizes = (words, paged.stride(0), paged.stride(1), dense.stride(0))
    with torch.cuda.device_of(planes):
        if on_host:
            turns = chunks * planes.shape[0]
            grid = (min(turns, HOST_PROGRAMS),)
            move_words_in_turn[grid](
                paged, dense, page_ids, turns, planes.shape[0], *sizes, PACK=pack, WORDS=block, num_warps=HOST_WARPS
            )
        else:
            move_words[(chunks, planes.shape[0])](paged, dense, page_ids, *sizes, PACK=pack, WORDS=block, num_warps=1)
