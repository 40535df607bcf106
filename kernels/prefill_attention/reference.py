"""prefill_attention in plain torch, in fp32: blocks of query rows over tiles of keys, both at absolute positions.

A sequence's result depends on that sequence alone. A matrix product's last bits depend on its shape and on a row's
place in it, so every product here has its full size, whatever part of it is used: a chunk's first and last block are
padded with rows of zeros, and a tile that reaches beyond the keys with keys of zeros. A tile of which a row sees
nothing leaves that row's state as it was. So a token's bits do not depend on the cuts.

    keys of a block     0 ........ WIDE ........ 2 WIDE .. | NARROW | NARROW |    wide tiles as long as every row sees
    queries                                                     [ROWS]            all of them, then narrow ones
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.nn import functional

from kernels.attention import LEAST_EXPONENT, AttentionSpec, float_span, visible_start
from kernels.errors import KernelArgumentError
from kernels.prefill_attention.call import PrefillCall
from kernels.softmax import MASKED

ROWS = 32
WIDE = 1024
NARROW = 256


def prefill_attention(call: PrefillCall, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Fills out, and lse where one is wanted."""
    q, spec = call.q, call.spec
    q_bounds, k_bounds = call.cu_seqlens_q.tolist(), call.cu_seqlens_k.tolist()
    if q.dim() == 4:
        q = q.transpose(0, 1).flatten(1, 2)
    for seq in range(len(q_bounds) - 1):
        start, new = q_bounds[seq], q_bounds[seq + 1] - q_bounds[seq]
        length = k_bounds[seq + 1] - k_bounds[seq]
        if not 0 <= new <= call.max_seqlen_q or length < new:
            raise KernelArgumentError(
                f"sequence {seq}: {new} queries (max_seqlen_q {call.max_seqlen_q}) and {length} keys"
            )
        if new == 0:
            continue
        low = visible_start(length - new, spec.window)
        keys, values = float_span(call.k_pages, call.v_pages, call.block_tables[seq], low, length, spec)
        span = _Span(keys, values, low, length)
        for first, stop in _blocks(length - new, length):
            rows = slice(start + first - (length - new), start + stop - (length - new))
            out[rows], row_lse = _attend(q[rows], span, first, spec, call.sinks)
            if lse is not None:
                lse[:, rows] = row_lse


class _Span(NamedTuple):
    """Keys and values [stop - start, kv_heads, dim] at one sequence's positions."""

    keys: torch.Tensor
    values: torch.Tensor
    start: int
    stop: int

    def tile(self, first: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [kv_heads, width, dim] from a position on; zeros where there are none."""
        low, high = max(first, self.start), min(first + width, self.stop)
        inside = slice(low - self.start, high - self.start)
        padding = (0, 0, 0, 0, low - first, first + width - high)
        keys, values = (
            rows[inside] if high - low == width else functional.pad(rows[inside], padding)
            for rows in (self.keys, self.values)
        )
        return keys.transpose(0, 1), values.transpose(0, 1)


def _blocks(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The parts of positions start..stop that lie in one block each."""
    for block in range(start // ROWS, -(-stop // ROWS)):
        yield max(start, block * ROWS), min(stop, (block + 1) * ROWS)


def _tiles(position: int, window: int, span: _Span) -> Iterator[tuple[int, int]]:
    """(first key, width) of every tile that the block at this position needs and the span reaches, in order."""
    first = visible_start(position, window) // NARROW * NARROW
    while first < min(position + ROWS, span.stop):
        width = WIDE if first % WIDE == 0 and first + WIDE <= position else NARROW
        if first + width > span.start:
            yield first, width
        first += width


def _attend(
    q: torch.Tensor, span: _Span, first: int, spec: AttentionSpec, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Out [n, q_heads, dim] and log-sum-exp [q_heads, n] of queries [n, q_heads, dim] from position `first` on."""
    count, q_heads, dim = q.shape
    kv_heads, group, skip = spec.shape.heads, q_heads // spec.shape.heads, first % ROWS
    block = q.new_zeros((q_heads, ROWS, dim), dtype=torch.float32)
    block[:, skip : skip + count] = q.transpose(0, 1).float() * spec.scale
    state = _State(block.view(kv_heads, group * ROWS, dim), spec.softcap)
    for key, width in _tiles(first - skip, spec.window, span):
        state.add(*span.tile(key, width), _hidden(first - skip, key, width, spec.window, q.device))
    if sinks is not None:
        state.add_sinks(sinks.float().repeat_interleave(ROWS).view(kv_heads, group * ROWS, 1))
    out, lse = (part.view(q_heads, ROWS, -1)[:, skip : skip + count] for part in state.result())
    return out.transpose(0, 1), lse.squeeze(2)


def _hidden(position: int, first: int, width: int, window: int, device: torch.device) -> torch.Tensor | None:
    """Keys [ROWS, width] that lie behind their query or before its window; None where there are none."""
    if first + width <= position + 1 and (not window or first > position + ROWS - 1 - window):
        return None
    query = torch.arange(position, position + ROWS, device=device).unsqueeze(1)
    key = torch.arange(first, first + width, device=device)
    hidden = key > query
    return hidden | (key <= query - window) if window else hidden


class _State:
    """A softmax that takes its keys tile by tile; all rows at once, [kv_heads, group * ROWS, ...]."""

    def __init__(self, queries: torch.Tensor, softcap: float) -> None:
        self._queries = queries
        self._softcap = softcap
        rows = (*queries.shape[:2], 1)
        self._row_max = queries.new_full(rows, MASKED)
        self._row_sum = queries.new_zeros(rows)
        self._acc = torch.zeros_like(queries)

    def add(self, keys: torch.Tensor, values: torch.Tensor, hidden: torch.Tensor | None) -> None:
        scores = torch.bmm(self._queries, keys.transpose(1, 2))
        if self._softcap:
            scores.div_(self._softcap).tanh_().mul_(self._softcap)
        by_row = scores.view(-1, ROWS, scores.shape[2])
        if hidden is not None:
            by_row.masked_fill_(hidden, MASKED)
        self._raise(torch.maximum(self._row_max, scores.amax(dim=-1, keepdim=True)))
        weights = scores.sub_(self._row_max).clamp_(min=LEAST_EXPONENT).exp_()
        if hidden is not None:
            by_row.masked_fill_(hidden, 0.0)
        self._row_sum.add_(weights.sum(dim=-1, keepdim=True))
        self._acc.baddbmm_(weights, values)

    def add_sinks(self, sinks: torch.Tensor) -> None:
        """A sink has no value: it only adds to the row_sum."""
        self._raise(torch.maximum(self._row_max, sinks))
        self._row_sum.add_(torch.exp(sinks - self._row_max))

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._acc / self._row_sum, self._row_max + self._row_sum.log()

    def _raise(self, row_max: torch.Tensor) -> None:
        decay = (self._row_max - row_max).clamp_(min=LEAST_EXPONENT).exp_()
        self._row_sum.mul_(decay)
        self._acc.mul_(decay)
        self._row_max = row_max
