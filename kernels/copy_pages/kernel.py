"""pack_pages and unpack_pages in Triton: pure traffic in the widest words that fit.

Knows only rows of bytes. One program moves one chunk of 4 KiB; a page's chunks are neighbours in launch order, which is
what keeps DRAM pages open.
"""

import torch
import triton
import triton.language as tl

WORDS = 512
WORD_TYPES = (torch.int64, torch.int32, torch.int16, torch.uint8)


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
    chunks = tl.cdiv(words, WORDS)
    row = (tl.program_id(0) // chunks).to(tl.int64)
    word = (tl.program_id(0) % chunks) * WORDS + tl.arange(0, WORDS)
    plane = tl.program_id(1).to(tl.int64)
    page = tl.load(ids_ptr + row).to(tl.int64)
    ok = word < words
    paged = planes_ptr + plane * stride_plane + page * stride_page + word
    dense = packed_ptr + row * stride_row + plane * words + word
    if PACK:
        tl.store(dense, tl.load(paged, mask=ok), mask=ok)
    else:
        tl.store(paged, tl.load(dense, mask=ok), mask=ok)


def launch_pack(planes: torch.Tensor, page_ids: torch.Tensor, packed: torch.Tensor) -> None:
    """packed[i, plane] = planes[plane, page_ids[i]]; checked, non-empty arguments."""
    _launch(planes, page_ids, packed, pack=True)


def launch_unpack(packed: torch.Tensor, planes: torch.Tensor, page_ids: torch.Tensor) -> None:
    """planes[plane, page_ids[i]] = packed[i, plane]; checked, non-empty arguments."""
    _launch(planes, page_ids, packed, pack=False)


def _launch(planes: torch.Tensor, page_ids: torch.Tensor, packed: torch.Tensor, pack: bool) -> None:
    word_type = _widest_word(planes, packed)
    paged, dense = planes.view(word_type), packed.view(word_type)
    words = paged.shape[2]
    block = min(WORDS, triton.next_power_of_2(words))
    grid = (packed.shape[0] * triton.cdiv(words, block), planes.shape[0])
    with torch.cuda.device_of(planes):
        move_words[grid](
            paged,
            dense,
            page_ids,
            words,
            paged.stride(0),
            paged.stride(1),
            dense.stride(0),
            PACK=pack,
            WORDS=block,
            num_warps=2,
        )


def _widest_word(planes: torch.Tensor, packed: torch.Tensor) -> torch.dtype:
    for word_type in WORD_TYPES:
        places = (
            planes.shape[2],
            planes.data_ptr(),
            packed.data_ptr(),
            planes.storage_offset(),
            packed.storage_offset(),
        )
        if all(place % word_type.itemsize == 0 for place in places):
            return word_type
    raise AssertionError("one byte always fits")
