"""compressed_attention: attention over a window of tokens and compressed entries, with sinks; a key is its value too.

A row's sums run over its window's tokens and then over its entries, in tiles and pieces of fixed sizes that are folded
in order, so its bits depend neither on how its prompt was cut nor on other requests.
"""

import torch

from kernels._checks import (
    KV_DTYPES,
    check_block_tables,
    check_dense,
    check_dense_pages,
    check_tensor,
    checked_out,
)
from kernels.attention import check_tensor_core_dtype
from kernels.backend import Backend, choose_backend
from kernels.compressed_attention import reference
from kernels.compressed_attention.call import CompressedCall, EntryPages
from kernels.compressed_attention.hopper import reason_against
from kernels.errors import KernelArgumentError
from kernels.key_rows import KeyRows, check_key_rows

__all__ = ["compressed_attention"]


def compressed_attention(
    q: torch.Tensor,
    window_pages: torch.Tensor,
    window_tables: torch.Tensor,
    rows: KeyRows,
    sinks: torch.Tensor,
    *,
    scale: float,
    window_tokens: int,
    entry_pages: torch.Tensor | None = None,
    entry_tables: torch.Tensor | None = None,
    ratio: int = 0,
    chosen: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    backend: Backend = Backend.AUTO,
) -> torch.Tensor:
    """Attention of q [num_tokens, heads, dim] over the last window_tokens positions of each row, its own included, and
    over compressed entries of `ratio` tokens each.

    window_pages [num_pages, page_tokens, dim], entry_pages [num_entry_pages, entries of a page, dim]; a row of either
    is a key and its value. Tables int32 [num_seqs, any]. A row reads all entries that it sees, `rows.entries(ratio)`,
    or with chosen int32 [num_tokens, k] the first min(seen, k) of these. sinks fp32 [heads] take a part of each row's
    weights. A row that sees no key gives 0. Returns [num_tokens, heads, dim].
    """
    entries = _entries(entry_pages, entry_tables, ratio, chosen)
    call = CompressedCall(q, window_pages, window_tables, rows, sinks, scale, window_tokens, entries)
    _check(call)
    out = checked_out(out, q.shape, q.dtype, q.device, q=q, window_pages=window_pages, entry_pages=entry_pages)
    if q.numel() == 0:
        return out
    route = choose_backend(backend, q, lambda: reason_against(call))
    if route is Backend.GLUON:
        from kernels.compressed_attention.hopper.launch import launch as launch_gluon

        launch_gluon(call, out)
    elif route is Backend.TRITON:
        from kernels.compressed_attention.triton import check_dims, launch

        check_tensor_core_dtype(q)
        check_dims(call)
        launch(call, out)
    else:
        reference.compressed_attention(call, out)
    return out


def _entries(
    pages: torch.Tensor | None, tables: torch.Tensor | None, ratio: int, chosen: torch.Tensor | None
) -> EntryPages | None:
    if (pages is None) != (tables is None) or (pages is None) != (ratio == 0):
        raise KernelArgumentError(f"entry_pages: pages, tables and a ratio come together, the ratio is {ratio}")
    if pages is None or tables is None:
        if chosen is not None:
            raise KernelArgumentError("chosen: there are no entries to choose from")
        return None
    if ratio < 0:
        raise KernelArgumentError(f"ratio: must be positive, got {ratio}")
    return EntryPages(pages, tables, ratio, chosen)


def _check(call: CompressedCall) -> None:
    """Refuses what no implementation can work with."""
    q, pages, entries = call.q, call.window_pages, call.entries
    check_tensor("window_pages", pages, (None, None, None), KV_DTYPES, q.device)
    check_dense_pages("window_pages", pages)
    dim = pages.shape[2]
    check_dense("q", q, (None, None, dim), (pages.dtype,), pages.device)
    check_key_rows(call.rows, q.shape[0], call.window_tables, q.device)
    check_dense("sinks", call.sinks, (q.shape[1],), (torch.float32,), q.device)
    if call.window_tokens < 1:
        raise KernelArgumentError(f"window_tokens: must be positive, got {call.window_tokens}")
    if entries is None:
        return
    check_tensor("entry_pages", entries.pages, (None, None, dim), (pages.dtype,), q.device)
    check_dense_pages("entry_pages", entries.pages)
    check_block_tables(entries.tables, call.window_tables.shape[0], q.device)
    if entries.chosen is not None:
        check_dense("chosen", entries.chosen, (q.shape[0], None), (torch.int32,), q.device)
        if entries.chosen.shape[1] == 0:
            raise KernelArgumentError("chosen: must have room for at least one entry")
