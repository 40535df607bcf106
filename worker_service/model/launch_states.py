"""The states of one launch, which all its layers share: each row's goes on from a slot, and goes back to slots."""

from __future__ import annotations

import torch

from kernels.backend import Backend
from kernels.causal_conv import causal_conv
from worker_service.gpu.page_pools import PagePools
from worker_service.model.launch_inputs import LaunchInputs
from worker_service.model.mixers import Taps


class LaunchStates:
    """The model's `States` for one launch."""

    def __init__(self, pools: PagePools, launch: LaunchInputs, backend: Backend) -> None:
        self._pools = pools
        self._states = launch.states
        self._backend = backend

    def convolve(self, layer: int, x: torch.Tensor, taps: Taps) -> torch.Tensor:
        states, pages = self._states, self._pools.layer_pages(layer)
        assert states is not None
        slots = states.slots[pages.group]
        assert slots is not None
        (columns,) = pages.planes
        return causal_conv(x, taps.weight, taps.bias, states.cu_seqlens_q, columns, slots, backend=self._backend)
