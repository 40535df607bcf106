"""softcap_logits in Triton: pure traffic, one program for a run of one row's columns."""

import torch
import triton
import triton.language as tl

COLUMNS = 2048


@triton.jit
def cap_rows(logits_ptr, out_ptr, stride_row, stride_out_row, cap, V, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    ok = column < V
    logits = tl.load(logits_ptr + row * stride_row + column, mask=ok, other=0.0)
    share = logits.to(tl.float32) / cap
    # tanh of the absolute value, whose exponential cannot overflow.
    below = tl.exp(-2.0 * tl.abs(share))
    capped = cap * (1.0 - below) / (1.0 + below)
    capped = tl.where(share < 0.0, -capped, capped)
    tl.store(out_ptr + row * stride_out_row + column, capped.to(logits.dtype), mask=ok)


def launch(logits: torch.Tensor, cap: float, out: torch.Tensor) -> None:
    """Fills out; checked, non-empty arguments."""
    rows, vocab_size = logits.shape
    with torch.cuda.device_of(logits):
        cap_rows[(rows, triton.cdiv(vocab_size, COLUMNS))](
            logits, out, logits.stride(0), out.stride(0), cap, vocab_size, COLUMNS=COLUMNS, num_warps=4
        )
