"""merge_attention_states: attention over two disjoint sets of keys, made one.

A log-sum-exp of minus infinity says that a side saw none.
"""

import torch

from kernels._checks import KV_DTYPES, check_dense, check_rows, check_tensor
from kernels.backend import Backend, uses_triton
from kernels.merge_attention_states import reference

__all__ = ["merge_attention_states"]


def merge_attention_states(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    backend: Backend = Backend.AUTO,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [num_tokens, heads, dim], lse [heads, num_tokens]) of both sides together.

    lse is fp32, natural log. A side with lse -inf or +inf (backends disagree on the marker) is empty and its output
    is not read: with one empty side the other comes back unchanged, with two the output is 0 and lse -inf.
    """
    device = out_a.device
    check_tensor("out_a", out_a, (None, None, None), KV_DTYPES, device)
    tokens, heads, _ = out_a.shape
    check_tensor("out_b", out_b, tuple(out_a.shape), (out_a.dtype,), device)
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        check_dense(name, lse, (heads, tokens), (torch.float32,), device)
    check_rows("out_a", out_a)
    check_rows("out_b", out_b)
    if out_a.numel() == 0 or not uses_triton(backend, out_a):
        return reference.merge_attention_states(out_a, lse_a, out_b, lse_b)
    from kernels.merge_attention_states.triton import launch

    return launch(out_a, lse_a, out_b, lse_b)
