"""compress_tokens: raw rows into their slots, and the entry of each block of tokens that ends in the launch.

An entry is a function of the raw rows of its block, and of the block before with overlap: where a prompt was cut and
what else is in the launch change no bit of it.
"""

import torch

from kernels._checks import (
    KV_DTYPES,
    check_block_tables,
    check_dense,
    check_dense_pages,
    check_disjoint,
    check_page_pair,
    check_rows,
    check_tensor,
)
from kernels.backend import Backend, uses_triton
from kernels.compress_tokens import reference
from kernels.compress_tokens.call import CompressCall, EntryRule
from kernels.errors import KernelArgumentError
from kernels.key_rows import KeyRows, check_key_rows

__all__ = ["compress_tokens"]


def compress_tokens(
    raw: torch.Tensor,
    raw_pages: torch.Tensor,
    raw_slots: torch.Tensor,
    raw_tables: torch.Tensor,
    rows: KeyRows,
    entry_pages: torch.Tensor,
    entry_tables: torch.Tensor,
    *,
    ratio: int,
    overlap: bool,
    bias: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    cos_sin: torch.Tensor,
    backend: Backend = Backend.AUTO,
) -> None:
    """Writes raw rows to their slots, and the entry of each block of `ratio` positions that ends with one of them.

    raw [num_tokens, width], rows may be slices of wider ones, has a token's values and then its gates, each [dim], or
    with overlap [2 dim]: for the next block's entry, then for its own. raw_pages [num_pages, page_tokens, width];
    raw_slots int64 [num_tokens], page_id * page_tokens + offset, negative for a row that sees no key; entry_pages
    [num_entry_pages, entries of a page, dim]; tables int32 [num_seqs, any]. bias fp32 [ratio, width / 2], norm [dim]
    (raw's dtype or fp32), cos_sin fp32 [max_positions, 2, turned / 2], cosines before sines.

    Each element of an entry is the sum of the values, weighted by the softmax of gates plus bias over the block's
    tokens. It goes through a root-mean-square norm, and its last elements turn, 2 i with 2 i + 1, by the position of
    the block's first token. All is fp32, rounded after the norm and after the turn.
    """
    rule = EntryRule(ratio, overlap, bias, norm, eps, cos_sin)
    call = CompressCall(raw, raw_pages, raw_slots, raw_tables, rows, entry_pages, entry_tables, rule)
    _check(call)
    if raw.shape[0] == 0:
        return
    if uses_triton(backend, raw):
        from kernels.compress_tokens.triton import launch

        launch(call)
    else:
        reference.compress_tokens(call)


def _check(call: CompressCall) -> None:
    """Refuses what no implementation can work with."""
    raw, raw_pages, entry_pages, rule = call.raw, call.raw_pages, call.entry_pages, call.rule
    check_tensor("entry_pages", entry_pages, (None, None, None), KV_DTYPES, raw.device)
    check_dense_pages("entry_pages", entry_pages)
    dim = entry_pages.shape[2]
    if rule.ratio < 1:
        raise KernelArgumentError(f"ratio: must be positive, got {rule.ratio}")
    half = 2 * dim if rule.overlap else dim
    check_tensor("raw", raw, (None, 2 * half), (entry_pages.dtype,), raw.device)
    check_rows("raw", raw)
    check_tensor("raw_pages", raw_pages, (None, None, 2 * half), (raw.dtype,), raw.device)
    check_dense_pages("raw_pages", raw_pages)
    check_dense("raw_slots", call.raw_slots, (raw.shape[0],), (torch.int64,), raw.device)
    check_key_rows(call.rows, raw.shape[0], call.raw_tables, raw.device)
    check_block_tables(call.entry_tables, call.raw_tables.shape[0], raw.device)
    check_dense("bias", rule.bias, (rule.ratio, half), (torch.float32,), raw.device)
    check_dense("norm", rule.norm, (dim,), (raw.dtype, torch.float32), raw.device)
    check_dense("cos_sin", rule.cos_sin, (None, 2, None), (torch.float32,), raw.device)
    if dim % 2 or not 0 < rule.turned <= dim:
        raise KernelArgumentError(f"cos_sin: must turn 2 to {dim} elements of an even number, got {rule.turned}")
    check_disjoint("raw_pages", raw_pages, "raw", raw)
    check_disjoint("entry_pages", entry_pages, "raw", raw)
    check_page_pair(raw_pages, entry_pages, "raw_pages", "entry_pages")
