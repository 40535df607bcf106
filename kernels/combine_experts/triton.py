"""combine_experts in Triton: pure traffic, one program for a run of one token's columns."""

import torch
import triton
import triton.language as tl

from kernels.launches import allow_next_launch_and_wait, overlap_options

COLUMNS = 1024


@triton.jit
def sum_rows(
    rows_ptr,
    weights_ptr,
    shared_ptr,
    gate_ptr,
    out_ptr,
    stride_row,
    stride_shared,
    stride_gate,
    D: tl.constexpr,
    TOP_K: tl.constexpr,
    PLACES: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    HAS_GATE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    allow_next_launch_and_wait(OVERLAPS)
    runs: tl.constexpr = tl.cdiv(D, COLUMNS)
    token = (tl.program_id(0) // runs).to(tl.int64)
    d = tl.program_id(0) % runs * COLUMNS + tl.arange(0, COLUMNS)
    ok = d < D
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    total = tl.zeros((COLUMNS,), tl.float32)
    for place in tl.static_range(TOP_K):
        row = tl.load(rows_ptr + (token * PLACES + place) * stride_row + d, mask=ok, other=0.0)
        total += tl.load(weights_ptr + token * PLACES + place) * row.to(tl.float32)
    if HAS_SHARED:
        shared = tl.load(shared_ptr + token * stride_shared + d, mask=ok, other=0.0).to(tl.float32)
        if HAS_GATE:
            gate = tl.load(gate_ptr + token * stride_gate).to(tl.float32)
            shared = (shared * (1.0 / (1.0 + tl.exp(-gate)))).to(dtype).to(tl.float32)
        total = total.to(dtype).to(tl.float32) + shared
    tl.store(out_ptr + token * D + d, total.to(dtype), mask=ok)


def launch(
    rows: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None,
    gate: torch.Tensor | None,
    out: torch.Tensor,
    top_k: int,
) -> None:
    """Fills out; checked, non-empty arguments. Products and sums are rounded apart, as torch does. Each token has as
    many rows as weights; the first top_k are summed."""
    num_tokens, dim = out.shape
    columns = min(COLUMNS, triton.next_power_of_2(dim))
    with torch.cuda.device_of(rows):
        sum_rows[(num_tokens * triton.cdiv(dim, columns),)](
            rows,
            weights,
            rows if shared is None else shared,
            rows if gate is None else gate,
            out,
            rows.stride(0),
            0 if shared is None else shared.stride(0),
            0 if gate is None else gate.stride(0),
            D=dim,
            TOP_K=top_k,
            PLACES=weights.shape[1],
            COLUMNS=columns,
            HAS_SHARED=shared is not None,
            HAS_GATE=gate is not None,
            num_warps=4,
            enable_fp_fusion=False,
            **overlap_options(rows.device),
        )
