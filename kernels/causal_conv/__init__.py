"""causal_conv: the short depthwise convolution of recurrent layers, over packed rows that carry their last columns.

Output t of a channel is the sum of `d_conv` taps over tokens t - d_conv + 1 .. t. A sequence's first tokens of a launch
need tokens that are gone: their columns, as they went in, are its state. So the state follows from tokens alone, and
neither it nor an output depends on where a prompt was cut or on the rest of the batch.
"""

import torch

from kernels._checks import (
    KV_DTYPES,
    check_contiguous,
    check_dense_pages,
    check_disjoint,
    check_lengths,
    check_rows,
    check_tensor,
    num_sequences,
)
from kernels.backend import Backend, uses_triton
from kernels.causal_conv import reference
from kernels.causal_conv.call import CausalConvCall
from kernels.errors import KernelArgumentError
from kernels.state_slots import StateSlots, check_slots

__all__ = ["MAX_D_CONV", "causal_conv"]

MAX_D_CONV = 8


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    states: torch.Tensor,
    slots: StateSlots,
    *,
    silu: bool = False,
    backend: Backend = Backend.AUTO,
) -> torch.Tensor:
    """Returns [num_tokens, channels], through silu if asked; reads and writes the columns that `slots` names.

    x [num_tokens, channels], rows may be slices of wider ones; weight [channels, d_conv], contiguous, the tap of the
    newest token last; bias [channels]; cu_seqlens_q int32 [num_rows + 1]. states [num_slots, d_conv - 1, channels],
    each slot dense: the last inputs of a sequence, the oldest first, zeros where it has none. All of one dtype; sums
    are fp32 and rounded once. A row may have any number of tokens, none too: then its state goes where it is to go.
    Outputs of padding rows, and of tokens behind the last row, are zeros.
    """
    call = CausalConvCall(x, weight, bias, cu_seqlens_q, states, slots, silu)
    _check(call)
    out = torch.empty((x.shape[0], x.shape[1]), dtype=x.dtype, device=x.device)
    if slots.num_rows == 0 or x.shape[1] == 0:
        return out.zero_()
    if uses_triton(backend, x):
        from kernels.causal_conv.triton import launch

        launch(call, out)
    else:
        reference.causal_conv(call, out)
    return out


def _check(call: CausalConvCall) -> None:
    """Refuses what no implementation can work with."""
    x, weight, states = call.x, call.weight, call.states
    check_tensor("weight", weight, (None, None), KV_DTYPES, weight.device)
    if not 2 <= call.d_conv <= MAX_D_CONV:
        raise KernelArgumentError(f"weight: must have 2 to {MAX_D_CONV} taps for each channel, got {call.d_conv}")
    check_contiguous("weight", weight)
    check_tensor("x", x, (None, call.channels), (weight.dtype,), weight.device)
    check_rows("x", x)
    if call.bias is not None:
        check_tensor("bias", call.bias, (call.channels,), (weight.dtype,), weight.device)
        check_rows("bias", call.bias)
    check_tensor("states", states, (None, call.d_conv - 1, call.channels), (weight.dtype,), weight.device)
    check_dense_pages("states", states)
    num_rows = num_sequences(call.cu_seqlens_q, "cu_seqlens_q")
    check_lengths("cu_seqlens_q", call.cu_seqlens_q, num_rows + 1, x.device)
    check_slots(call.slots, num_rows, x.device)
    check_disjoint("states", states, "x", x)
