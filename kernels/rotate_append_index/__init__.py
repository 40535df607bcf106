"""rotate_append_index: from the outputs of an indexer's GEMMs to what index_logits reads, in one launch.

Keys go through a layer norm, rotary parts of queries and keys are turned by their positions, keys are put into their
slots, as fp8 with a scale for each token where the pages are fp8.
"""

import torch

from kernels._checks import KV_DTYPES, check_appended, check_dense, check_page_pair, check_tensor
from kernels.backend import Backend, uses_triton
from kernels.errors import KernelArgumentError
from kernels.fp8 import check_scaled_rows
from kernels.rotate_append_index import reference
from kernels.rotate_append_index.call import RotateAppendIndexCall

__all__ = ["rotate_append_index"]


def rotate_append_index(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    norm: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    scales: torch.Tensor | None = None,
    backend: Backend = Backend.AUTO,
) -> None:
    """Turns the first `rope` elements of each head of q in place, and writes each token's key into its slot.

    q [num_tokens, heads, dim] and k [num_tokens, dim], rows may be slices of wider ones; positions int32 or int64
    [num_tokens]; cos_sin fp32 [max_positions, 2, rope / 2], cosines before sines: element i turns with element
    i + rope / 2. pages [num_pages, page_tokens, dim] in k's dtype, or fp8 e4m3 with `scales` fp32 [num_pages,
    page_tokens], which is written with them; slot_mapping int64 [num_tokens], page_id * page_tokens + offset: a token
    with a negative slot writes nothing, its q is turned all the same. Two tokens must not name one slot.

    A key is k by its mean and variance, times `norm` plus `bias` [dim] (k's dtype or fp32), its first elements turned.
    It is computed in fp32, rounded to k's dtype after the norm and after the turn, and then to fp8 where pages are.
    """
    call = RotateAppendIndexCall(q, k, positions, cos_sin, pages, slot_mapping, norm, bias, eps, scales)
    _check(call)
    if q.shape[0] == 0:
        return
    if uses_triton(backend, q):
        from kernels.rotate_append_index.triton import launch

        launch(call)
    else:
        reference.rotate_append_index(call)


def _check(call: RotateAppendIndexCall) -> None:
    """Refuses what no implementation can work with."""
    q, k, pages, scales = call.q, call.k, call.pages, call.scales
    check_tensor("k", k, (None, None), KV_DTYPES, k.device)
    tokens, dim = k.shape
    check_scaled_rows(pages, scales, dim, k.dtype, k.device)
    if scales is not None:
        check_page_pair(pages, scales, "pages", "scales")
    for name, weight in (("norm", call.norm), ("bias", call.bias)):
        check_dense(name, weight, (dim,), (k.dtype, torch.float32), k.device)
    check_dense("cos_sin", call.cos_sin, (None, 2, None), (torch.float32,), k.device)
    if not 0 < call.rope <= dim:
        raise KernelArgumentError(f"cos_sin: must turn 1 to {dim} elements, got {call.rope}")
    check_tensor("q", q, (tokens, None, dim), (k.dtype,), k.device)
    check_appended(q, k, call.positions, call.slot_mapping, pages)
