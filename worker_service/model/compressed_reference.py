"""What compressed attention and streams compute, in plain torch: a row's bits depend on nothing but the row."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.backend import Backend
from kernels.key_rows import KeyRows
from kernels.rms_norm import rms_norm
from kernels.route_experts import Routing, RoutingRule

LEAST_SUM = 1e-20


class Collapsed(NamedTuple):
    """One row of each token's streams, x [num_tokens, hidden]; how a branch's output goes to each stream, post fp32
    [num_tokens, n], and how the streams go to each other, comb fp32 [num_tokens, n, n], from the first of both."""

    x: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor


def turn_tail(
    x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, *, inverse: bool = False
) -> torch.Tensor:
    """Returns x [num_tokens, heads, dim] with its last elements turned, neighbours together; cos_sin fp32
    [max_tokens, 2, turned / 2]."""
    cos, sin = cos_sin[positions].unsqueeze(2).unbind(1)
    sin = -sin if inverse else sin
    turned = 2 * cos.shape[-1]
    even, odd = x[..., -turned::2].float(), x[..., 1 - turned :: 2].float()
    tail = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
    return torch.cat((x[..., :-turned], tail.to(x.dtype)), dim=-1)


def append_rows(rows: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
    """Slot slots[t] of pages [num_pages, page_tokens, width] = rows[t]; a negative slot is skipped."""
    live = (slots >= 0).nonzero()[:, 0]
    page, offset = slots[live] // pages.shape[1], slots[live] % pages.shape[1]
    pages[page, offset] = rows[live]


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
    """Writes raw rows to their slots, and the entry of each block that ends with one of these tokens.

    raw [num_tokens, width] has a token's values, then its gates, each [dim], or with overlap [2 dim]: for the next
    block's entry, then for its own. bias fp32 [ratio, width / 2].
    """
    append_rows(raw, raw_pages, raw_slots)
    ends = ((rows.num_keys > 0) & (rows.num_keys % ratio == 0)).nonzero()[:, 0]
    if ends.numel() == 0:
        return
    sequences, entries = rows.sequences[ends].long(), rows.num_keys[ends].long() // ratio - 1
    offsets = torch.arange(-ratio if overlap else 0, ratio, device=raw.device)
    positions = entries.unsqueeze(1) * ratio + offsets
    held = _rows_at(raw_pages, raw_tables, sequences, positions.clamp(min=0))
    values, gates = held.chunk(2, dim=-1)
    values, gates = _of_blocks(values, ratio, overlap), _of_blocks(gates.float(), ratio, overlap)
    gates = gates + _of_blocks(bias.repeat(2, 1)[-offsets.shape[0] :].unsqueeze(0), ratio, overlap)
    before = (positions < 0).unsqueeze(-1)
    weights = gates.masked_fill(before, -torch.inf).softmax(dim=1).to(values.dtype)
    made = (values.masked_fill(before, 0.0) * weights).sum(dim=1)
    made = turn_tail(rms_norm(made, norm, eps, backend=backend).unsqueeze(1), entries * ratio, cos_sin).squeeze(1)
    of_page = entry_pages.shape[1]
    entry_pages[entry_tables.long()[sequences, entries // of_page], entries % of_page] = made


def _of_blocks(rows: torch.Tensor, ratio: int, overlap: bool) -> torch.Tensor:
    """Of rows [n, tokens, width] what goes into an entry: of the block before the first half, of its own the second."""
    if not overlap:
        return rows
    dim = rows.shape[-1] // 2
    return torch.cat((rows[:, :ratio, :dim], rows[:, ratio:, dim:]), dim=1)


def _rows_at(
    pages: torch.Tensor, tables: torch.Tensor, sequences: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Returns [n, m, width]: what sequence i has at positions [n, m]."""
    page = tables.long()[sequences.unsqueeze(1), positions // pages.shape[1]]
    return pages[page, positions % pages.shape[1]]


def collapsed_streams(
    streams: torch.Tensor, mixes: torch.Tensor, base: torch.Tensor, scale: torch.Tensor, *, eps: float, num_iters: int
) -> Collapsed:
    """Returns what a branch gets of streams [num_tokens, n, hidden], and how its output goes back.

    mixes fp32 [num_tokens, (2 + n) n]: what `fn` makes of the streams' normed row."""
    n = streams.shape[1]
    pre, post, comb = torch.split(mixes, [n, n, n * n], dim=-1)
    pre_base, post_base, comb_base = torch.split(base, [n, n, n * n])
    to_branch = _sigmoid(pre * scale[0] + pre_base) + eps
    from_branch = 2.0 * _sigmoid(post * scale[1] + post_base)
    matrix = (comb * scale[2] + comb_base).view(-1, n, n).softmax(dim=-1) + eps
    matrix = matrix / (matrix.sum(dim=-2, keepdim=True) + eps)
    for _ in range(num_iters - 1):
        matrix = matrix / (matrix.sum(dim=-1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(dim=-2, keepdim=True) + eps)
    x = (to_branch.unsqueeze(-1) * streams).sum(dim=1).to(streams.dtype)
    return Collapsed(x, from_branch, matrix)


def expand_streams(out: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """Returns the streams [num_tokens, n, hidden] behind a branch that made out [num_tokens, hidden]."""
    kept = (comb.to(streams.dtype).unsqueeze(-1) * streams.unsqueeze(2)).sum(dim=1)
    return post.to(streams.dtype).unsqueeze(-1) * out.unsqueeze(1) + kept


def joined_streams(
    streams: torch.Tensor, mixes: torch.Tensor, base: torch.Tensor, scale: torch.Tensor, *, eps: float
) -> torch.Tensor:
    """Returns the streams as one row a token, [num_tokens, hidden]; mixes fp32 [num_tokens, n]."""
    weights = _sigmoid(mixes * scale + base) + eps
    return (weights.unsqueeze(-1) * streams).sum(dim=1).to(streams.dtype)


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1.0 / (1.0 + (-x).exp())


def route_sqrt_softplus(
    logits: torch.Tensor, rule: RoutingRule, bias: torch.Tensor | None, expert_ids: torch.Tensor | None
) -> Routing:
    """Returns the best experts by sqrt(softplus(logit)) + bias, or those given, weighted by their scores."""
    scores = torch.where(logits > 20.0, logits, logits.clamp(max=20.0).exp().log1p()).sqrt()
    if expert_ids is None:
        ranked = scores if bias is None else scores + bias
        expert_ids = ranked.sort(dim=-1, descending=True, stable=True).indices[:, : rule.top_k].to(torch.int32)
    weights = scores.gather(1, expert_ids.long())
    weights = weights / (weights.sum(dim=-1, keepdim=True) + LEAST_SUM) * rule.scale
    return Routing(expert_ids.contiguous(), weights)
