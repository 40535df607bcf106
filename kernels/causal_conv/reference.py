"""causal_conv in plain torch: what each row carries, then its tokens, as one list, and the taps' columns taken from it.

Each element is a chain of products and sums of its own in fp32, oldest tap first, so no row beside it changes its bits.
"""

import torch

from kernels.causal_conv.call import CausalConvCall
from kernels.state_slots.reference import initial_states, write_states


def causal_conv(call: CausalConvCall, out: torch.Tensor) -> None:
    """Fills out and writes the states."""
    slots, carried = call.slots, call.d_conv - 1
    begins = call.cu_seqlens_q.long()
    lengths = begins.diff()
    num_rows, num_tokens = slots.num_rows, int(begins[-1])
    columns = torch.cat((initial_states(call.states, slots).flatten(0, 1), call.x))

    def column_at(row: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        """Returns where column `place` of a row lies: what it carries counts from 0, its tokens behind that."""
        is_carried = place < carried
        return torch.where(is_carried, row * carried + place, num_rows * carried + begins[row] + place - carried)

    row = torch.arange(num_rows, device=out.device).repeat_interleave(lengths)
    local = torch.arange(num_tokens, device=out.device) - begins[row]
    total = out.new_zeros((num_tokens, call.channels), dtype=torch.float32)
    if call.bias is not None:
        total += call.bias.float()
    for tap in range(call.d_conv):
        total += columns[column_at(row, local + tap)].float() * call.weight[:, tap].float()
    if call.has_silu:
        total /= total.neg().exp_().add_(1.0)
    total[(slots.working <= 0)[row]] = 0.0
    out[:num_tokens] = total
    out[num_tokens:] = 0.0

    def states_after(row: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return columns[column_at(row[:, None], tokens[:, None] + torch.arange(carried, device=out.device))]

    rows = torch.arange(num_rows, device=out.device)
    ends, left = states_after(rows, lengths), slots.leave_row.long()
    write_states(call.states, slots.leave_slot, states_after(left, slots.leave_tokens.long()))
    write_states(call.states, slots.rolling.masked_fill(slots.working <= 0, 0), ends)
    write_states(call.states, slots.working, ends)
