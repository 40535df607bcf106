"""copy_states: whole slots of a pool onto others of it, as raw bytes, all layers in one launch.

For states that move without a launch of the model. What a launch restores and leaves needs no copy: its kernels read
and write those slots themselves (kernels/state_slots).
"""

from collections.abc import Sequence

import torch

from kernels._checks import INDEX_DTYPES, check_dense
from kernels.backend import Backend, uses_triton
from kernels.byte_planes import byte_planes
from kernels.copy_states import reference
from kernels.errors import KernelArgumentError

__all__ = ["check_copies", "copy_states"]


def copy_states(
    pool: torch.Tensor,
    sources: torch.Tensor,
    destinations: torch.Tensor,
    *,
    slot_axis: int = 0,
    backend: Backend = Backend.AUTO,
) -> None:
    """Slot destinations[i] becomes what slot sources[i] is; a pair with a number of 0 or less is skipped.

    pool: contiguous, any dtype, `slot_axis` counts its slots; the axes before it are layers, so [num_layers, num_slots,
    ...] has slot_axis 1. sources, destinations int32 or int64 [n], on the pool's device: `check_copies` holds for them,
    which the caller sees to before they go there.
    """
    planes = byte_planes(pool, "pool", slot_axis, "slot_axis")
    for name, slots in (("sources", sources), ("destinations", destinations)):
        check_dense(name, slots, (sources.shape[0] if sources.dim() else None,), INDEX_DTYPES, pool.device)
    if not pool.is_cuda:
        check_copies(sources.tolist(), destinations.tolist(), pool.shape[slot_axis])
    if sources.numel() == 0 or pool.numel() == 0:
        return
    if uses_triton(backend, pool):
        from kernels.copy_states.triton import launch

        launch(planes, sources, destinations)
    else:
        reference.copy_states(planes, sources, destinations)


def check_copies(sources: Sequence[int], destinations: Sequence[int], num_slots: int) -> None:
    """Refuses a slot that the pool has not, and one that is written and named once more: copies have no order."""
    pairs = [pair for pair in zip(sources, destinations, strict=True) if min(pair) > 0]
    for name, slots in (("sources", sources), ("destinations", destinations)):
        beyond = [slot for slot in slots if slot >= num_slots]
        if beyond:
            raise KernelArgumentError(f"{name}: must be below {num_slots}, got {beyond[0]}")
    named = {source for source, _ in pairs}
    for _, destination in pairs:
        if destination in named:
            raise KernelArgumentError(f"destinations: slot {destination} is named twice")
        named.add(destination)
