"""rotate_append_tail: from the outputs of a layer's GEMMs to what compressed_attention reads, in one launch.

The one key of a token is normalised, last elements of queries and keys are turned, keys are put into their slots.
"""

import torch

from kernels._checks import KV_DTYPES, check_appended, check_dense, check_dense_pages, check_tensor
from kernels.backend import Backend, uses_triton
from kernels.errors import KernelArgumentError
from kernels.rotate_append_tail import reference
from kernels.rotate_append_tail.call import RotateAppendTailCall

__all__ = ["rotate_append_tail"]


def rotate_append_tail(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    norm: torch.Tensor,
    eps: float,
    backend: Backend = Backend.AUTO,
) -> None:
    """Turns the last `turned` elements of each head of q in place, and writes each token's key into its slot.

    q [num_tokens, heads, dim] and k [num_tokens, dim], rows may be slices of wider ones; positions int32 or int64
    [num_tokens]; cos_sin fp32 [max_positions, 2, turned / 2], cosines before sines: elements 2 i and 2 i + 1 of those
    that turn do so with each other. pages [num_pages, page_tokens, dim] in k's dtype; slot_mapping int64 [num_tokens],
    page_id * page_tokens + offset: a token with a negative slot writes no key, its q is turned all the same. Two tokens
    must not name one slot.

    A key is k through a root-mean-square norm with weight `norm` [dim] (k's dtype or fp32), its last elements turned.
    It is computed in fp32, and rounded after the norm and after the turn.
    """
    call = RotateAppendTailCall(q, k, positions, cos_sin, pages, slot_mapping, norm, eps)
    _check(call)
    if k.shape[0] == 0:
        return
    if uses_triton(backend, pages):
        from kernels.rotate_append_tail.triton import launch

        launch(call)
    else:
        reference.rotate_append_tail(call)


def _check(call: RotateAppendTailCall) -> None:
    """Refuses what no implementation can work with."""
    q, k, pages, cos_sin = call.q, call.k, call.pages, call.cos_sin
    check_tensor("k", k, (None, None), KV_DTYPES, k.device)
    tokens, dim = k.shape
    check_tensor("pages", pages, (None, None, dim), (k.dtype,), k.device)
    check_dense_pages("pages", pages)
    check_dense("norm", call.norm, (dim,), (k.dtype, torch.float32), k.device)
    check_dense("cos_sin", cos_sin, (None, 2, None), (torch.float32,), k.device)
    if dim % 2 or not 0 < call.turned <= dim:
        raise KernelArgumentError(f"cos_sin: must turn 2 to {dim} elements of an even number, got {call.turned}")
    check_tensor("q", q, (tokens, None, dim), (k.dtype,), k.device)
    check_appended(q, k, call.positions, call.slot_mapping, pages)
