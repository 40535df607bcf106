"""rotate_append_index: from the outputs of an indexer's GEMMs to what index_logits reads, in one launch.

Keys go through a layer norm, rotary parts of queries and keys are turned by their positions, keys are put into their
slots. Where the pages are fp8, keys and queries become fp8, with a scale for each token's key and head.
"""

import torch

from kernels._checks import KV_DTYPES, check_appended, check_dense, check_page_pair, check_rows, check_tensor
from kernels.backend import Backend, uses_triton
from kernels.errors import KernelArgumentError
from kernels.fp8 import E4M3, check_scaled_rows
from kernels.rotate_append_index import reference
from kernels.rotate_append_index.call import IndexQueries, RotateAppendIndexCall

__all__ = ["IndexQueries", "rotate_append_index"]


def rotate_append_index(
    q: torch.Tensor,
    weights: torch.Tensor,
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
) -> IndexQueries:
    """Writes each token's key into its slot, and returns the queries and weights for `index_logits` over these pages.

    The queries are q, of each head the first `rope` elements turned, in place. With fp8 pages q stays as it was, and
    new tensors are returned: the turned queries as e4m3 with a scale for each token and head, and the weights times
    these scales, which max(x, 0) lets pass as it lets pass the keys'.

    q [num_tokens, heads, dim] and k [num_tokens, dim], rows may be slices of wider ones; weights fp32 [num_tokens,
    heads], what the heads' scores are multiplied by; positions int32 or int64
    [num_tokens]; cos_sin fp32 [max_positions, 2, rope / 2], cosines before sines: element i turns with element
    i + rope / 2. pages [num_pages, page_tokens, dim] in k's dtype, or fp8 e4m3 with `scales` fp32 [num_pages,
    page_tokens], which is written with them; slot_mapping int64 [num_tokens], page_id * page_tokens + offset: a token
    with a negative slot writes nothing, its query is made all the same. Two tokens must not name one slot.

    A key is k by its mean and variance, times `norm` plus `bias` [dim] (k's dtype or fp32), its first elements turned.
    It is computed in fp32, rounded to k's dtype after the norm and after the turn, and then to fp8 where pages are.
    """
    call = RotateAppendIndexCall(q, weights, k, positions, cos_sin, pages, slot_mapping, norm, bias, eps, scales)
    _check(call)
    queries = IndexQueries(q, weights)
    if scales is not None:
        queries = IndexQueries(q.new_empty(q.shape, dtype=E4M3), weights.new_empty(weights.shape))
    if q.shape[0] == 0:
        return queries
    if uses_triton(backend, q):
        from kernels.rotate_append_index.triton import launch

        launch(call, queries)
    else:
        reference.rotate_append_index(call, queries)
    return queries


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
    check_tensor("weights", call.weights, (tokens, q.shape[1]), (torch.float32,), k.device)
    check_rows("weights", call.weights)
    check_appended(q, k, call.positions, call.slot_mapping, pages)
