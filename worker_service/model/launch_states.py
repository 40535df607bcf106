"""The states of one launch, which all its layers share: each row's goes on from a slot, and goes back to slots.

rows            decode rows                     prompts' rows
convolution     one call for all of them
recurrence      token by token (state_update)   in blocks at fixed positions, which `plan_scan` lays out
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from kernels.backend import Backend
from kernels.block_scan import ScanPlan, plan_scan
from kernels.causal_conv import causal_conv
from kernels.copy_states import copy_states
from kernels.gated_delta_scan import gated_delta_scan
from kernels.mamba2_scan import mamba2_scan
from kernels.state_slots import StateSlots
from kernels.state_update import update_gated_delta, update_mamba2
from worker_service.gpu.page_pools import LayerPages, PagePools
from worker_service.model.launch_inputs import LaunchInputs
from worker_service.model.mixers import GatedDeltaRows, Mamba2Rows, Taps
from worker_service.model.state_inputs import ROW_FIELDS, StateInputs

# Added to the sum of squares of a query or key, whose root divides it; the same in all files.
UNIT_EPS = 1e-6
# What a layer's recurrence makes of its tokens, given as a slice of the launch's: of decode rows, whose sums of tokens
# and slots it gets, and of prompts.
Update = Callable[[slice, torch.Tensor, StateSlots], torch.Tensor]
Scan = Callable[[slice, ScanPlan], torch.Tensor]


class _Rows(NamedTuple):
    """A group's slots by what goes over them; None where the launch has no such rows.

    copies   slots of decode rows, and where their states go besides: updates leave none themselves
    """

    decode: StateSlots | None
    prompts: ScanPlan | None
    copies: tuple[torch.Tensor, torch.Tensor] | None


class LaunchStates:
    """The model's `States` for one launch."""

    def __init__(self, pools: PagePools, launch: LaunchInputs, backend: Backend) -> None:
        self._pools = pools
        self._launch = launch
        self._backend = backend
        self._rows: dict[int, _Rows] = {}

    def convolve(self, layer: int, x: torch.Tensor, taps: Taps) -> torch.Tensor:
        states, pages = self._states, self._pools.layer_states(layer)
        slots = self._slots(pages)
        return causal_conv(
            x,
            taps.weight,
            taps.bias,
            states.cu_seqlens_q,
            pages.planes[0],
            slots,
            silu=taps.has_silu,
            backend=self._backend,
        )

    def mamba2(self, layer: int, rows: Mamba2Rows) -> torch.Tensor:
        pages, backend = self._pools.layer_states(layer), self._backend
        sums = pages.planes[1]

        def update(tokens: slice, cu_seqlens_q: torch.Tensor, slots: StateSlots) -> torch.Tensor:
            x, b, c, steps, skip, gate = rows.part(tokens)
            return update_mamba2(x, b, c, steps, sums, cu_seqlens_q, slots, skip=skip, gate=gate, backend=backend)

        def scan(tokens: slice, plan: ScanPlan) -> torch.Tensor:
            x, b, c, steps, skip, gate = rows.part(tokens)
            return mamba2_scan(x, b, c, steps, sums, plan, skip=skip, gate=gate, backend=backend)

        return self._over_rows(pages, update, scan)

    def gated_delta(self, layer: int, rows: GatedDeltaRows) -> torch.Tensor:
        pages, backend = self._pools.layer_states(layer), self._backend
        sums = pages.planes[1]

        def update(tokens: slice, cu_seqlens_q: torch.Tensor, slots: StateSlots) -> torch.Tensor:
            part = rows.part(tokens)
            return update_gated_delta(*part, sums, cu_seqlens_q, slots, norm_eps=UNIT_EPS, backend=backend)

        def scan(tokens: slice, plan: ScanPlan) -> torch.Tensor:
            return gated_delta_scan(*rows.part(tokens), sums, plan, norm_eps=UNIT_EPS, backend=backend)

        return self._over_rows(pages, update, scan)

    def _over_rows(self, pages: LayerPages, update: Update, scan: Scan) -> torch.Tensor:
        """Returns what both make of the launch's tokens, in their order."""
        num_decode, rows = self._launch.num_decode, self._rows_of(pages)
        made = []
        if rows.decode is not None:
            # All tokens of the launch without prompts: those behind the last row become zeros.
            tokens = slice(num_decode if rows.prompts else None)
            made.append(update(tokens, self._states.cu_seqlens_q[: num_decode + 1], rows.decode))
        if rows.copies is not None:
            copy_states(pages.planes[1], *rows.copies, backend=self._backend)
        if rows.prompts is not None:
            made.append(scan(slice(num_decode, None), rows.prompts))
        return made[0] if len(made) == 1 else torch.cat(made)

    def _rows_of(self, pages: LayerPages) -> _Rows:
        """Returns the group's rows; its first layer makes them."""
        if pages.group not in self._rows:
            self._rows[pages.group] = self._split(self._slots(pages))
        return self._rows[pages.group]

    def _split(self, slots: StateSlots) -> _Rows:
        launch, num_decode = self._launch, self._launch.num_decode
        decode = _of_rows(slots, slice(num_decode), slice(0)) if num_decode else None
        copies = self._copies(slots) if num_decode and slots.num_leaves else None
        if not launch.num_prefill:
            return _Rows(decode, None, copies)
        prompts = _of_rows(slots, slice(num_decode, None), slice(None))
        if num_decode:
            row = prompts.leave_row - num_decode
            prompts = prompts._replace(leave_row=row, leave_slot=prompts.leave_slot.masked_fill(row < 0, 0))
        num_tokens = launch.token_ids.shape[0] - num_decode
        plan = plan_scan(launch.prefill_cu_q, launch.prefill_cu_k, prompts, num_tokens, backend=self._backend)
        return _Rows(decode, plan, copies)

    def _copies(self, slots: StateSlots) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Returns what decode rows leave, padded by zeros; None in a captured launch, where they leave nothing."""
        if self._launch.prompt_lens is None:
            return None
        left = slots.leave_row < self._launch.num_decode
        sources = slots.working[slots.leave_row.long()]
        return sources.masked_fill(~left, 0), slots.leave_slot.masked_fill(~left, 0)

    @property
    def _states(self) -> StateInputs:
        assert self._launch.states is not None, "a model with states"
        return self._launch.states

    def _slots(self, pages: LayerPages) -> StateSlots:
        slots = self._states.slots[pages.group]
        assert slots is not None, "a group of states"
        return slots


def _of_rows(slots: StateSlots, rows: slice, leaves: slice) -> StateSlots:
    taken = (
        values[rows if name in ROW_FIELDS else leaves] for name, values in zip(StateSlots._fields, slots, strict=True)
    )
    return StateSlots(*taken)
