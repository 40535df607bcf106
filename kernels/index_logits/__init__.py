"""index_logits: how much an indexer wants each key of a sequence, for each query: sparse attention's choice.

logits[t, p] = sum over index heads h of weights[t, h] * max(q[t, h] . key p, 0)
"""

import torch

from kernels._checks import KV_DTYPES, check_head_rows, check_rows, check_tensor, checked_out
from kernels.attention import check_tensor_core_dtype
from kernels.backend import Backend, choose_backend
from kernels.errors import KernelArgumentError
from kernels.fp8 import E4M3, check_scaled_rows
from kernels.index_logits import cpu, reference
from kernels.index_logits.call import IndexLogitsCall
from kernels.index_logits.hopper import is_better_plain, reason_against
from kernels.key_rows import KeyRows, check_key_rows

__all__ = ["index_logits"]

# What one product of the kernel takes.
MAX_HEADS, MAX_DIM = 128, 256


def index_logits(
    q: torch.Tensor,
    weights: torch.Tensor,
    pages: torch.Tensor,
    block_tables: torch.Tensor,
    rows: KeyRows,
    max_keys: int,
    *,
    scales: torch.Tensor | None = None,
    least_keys: int = 0,
    out: torch.Tensor | None = None,
    backend: Backend = Backend.AUTO,
) -> torch.Tensor:
    """Returns fp32 [num_tokens, max_keys]; what lies behind the keys that a row sees is not written.

    q [num_tokens, heads, dim], rows may be slices of wider ones; weights fp32 [num_tokens, heads], factors of the
    scores included; pages [num_pages, page_tokens, dim] in q's dtype; block_tables int32 [num_seqs, any]; max_keys
    bounds rows.num_keys. A row that sees at most `least_keys` is left out: nobody needs to choose among so few. A
    logit's bits depend on its query and its key alone on a GPU, on a CPU also on how many keys the query sees.

    Pages of fp8 e4m3 have `scales` fp32 [num_pages, page_tokens], by which a key's logits are multiplied; q is e4m3
    too, and its scales, one for each token and head, are factors of the weights (`rotate_append_index` makes both).
    """
    call = IndexLogitsCall(q, weights, pages, block_tables, rows, max_keys, scales, least_keys)
    _check(call)
    out = checked_out(out, (q.shape[0], max_keys), torch.float32, q.device, q=q)
    if out.numel() == 0 or max_keys <= least_keys:
        return out
    route = choose_backend(backend, q, lambda: reason_against(call))
    if route is Backend.GLUON and not (backend is Backend.AUTO and is_better_plain(call)):
        from kernels.index_logits.hopper.launch import launch as launch_gluon

        launch_gluon(call, out)
    elif route is not Backend.REFERENCE:
        from kernels.index_logits.triton import launch

        if q.dtype is not E4M3:
            check_tensor_core_dtype(q)
        launch(call, out)
    elif backend is Backend.AUTO and cpu.reason_against(call) is None:
        cpu.index_logits(call, out)
    else:
        reference.index_logits(call, out)
    return out


def _check(call: IndexLogitsCall) -> None:
    """Refuses what no implementation can work with."""
    q, pages = call.q, call.pages
    check_tensor("q", q, (None, None, None), (*KV_DTYPES, E4M3), q.device)
    check_head_rows("q", q)
    tokens, heads, dim = q.shape
    if not (1 <= heads <= MAX_HEADS and 1 <= dim <= MAX_DIM):
        raise KernelArgumentError(f"q: must have 1 to {MAX_HEADS} heads of 1 to {MAX_DIM}, got {heads} of {dim}")
    check_tensor("weights", call.weights, (tokens, heads), (torch.float32,), q.device)
    check_rows("weights", call.weights)
    check_scaled_rows(pages, call.scales, dim, q.dtype, q.device)
    if q.dtype is not pages.dtype:
        raise KernelArgumentError(f"q: dtype must be pages' {pages.dtype}, got {q.dtype}")
    check_key_rows(call.rows, tokens, call.block_tables, q.device)
    room = call.block_tables.shape[1] * pages.shape[1]
    if not 0 <= call.max_keys <= room:
        raise KernelArgumentError(f"max_keys: must be in 0..{room}, what a block table holds, got {call.max_keys}")
    if call.least_keys < 0:
        raise KernelArgumentError(f"least_keys: must not be negative, got {call.least_keys}")
