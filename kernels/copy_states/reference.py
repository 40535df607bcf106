"""copy_states in plain torch."""

import torch


def copy_states(planes: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor) -> None:
    """planes[:, destinations[i]] = planes[:, sources[i]] of pairs that name slots; planes uint8 [layers, slots, bytes].

    A layer at a time: what is read is a copy.
    """
    named = (sources > 0) & (destinations > 0)
    read, written = sources[named].long(), destinations[named].long()
    for plane in planes:
        plane.index_copy_(0, written, plane[read])
