"""pack_pages and unpack_pages in plain torch."""

import torch


def pack_pages(planes: torch.Tensor, page_ids: torch.Tensor, packed: torch.Tensor) -> None:
    """packed[i, plane] = planes[plane, page_ids[i]].

    planes uint8 [num_planes, num_pages, bytes], packed uint8 [n, num_planes, bytes].
    """
    packed.copy_(planes.index_select(1, page_ids.long()).transpose(0, 1))


def unpack_pages(packed: torch.Tensor, planes: torch.Tensor, page_ids: torch.Tensor) -> None:
    """planes[plane, page_ids[i]] = packed[i, plane]."""
    planes.index_copy_(1, page_ids.long(), packed.transpose(0, 1))
