"""prefill_attention on a CPU: torch's scaled_dot_product_attention, one block of query rows after the other.

A block's position decides which keys it gets and so the shape of its products: whole blocks of ROWS positions, padded
with rows of zeros where the chunk or its keys end within one. So a token's bits do not depend on the cuts.

    keys of a block     [first visible, rounded down ......... end of the block)
    queries                                             [ROWS, each for `group` heads]
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from kernels.attention import scaled_span, visible_start
from kernels.errors import KernelArgumentError
from kernels.fp8 import ScaleKind
from kernels.prefill_attention.call import PrefillCall

ROWS = 32


def reason_against(call: PrefillCall, lse: torch.Tensor | None) -> str | None:
    """Returns why the reference has to take the case; None where this does."""
    spec = call.spec
    if call.q.device.type != "cpu" or call.q.dtype is not torch.float32:
        return "queries must be fp32 on a CPU"
    if spec.scales is not None and spec.scales.kind is not ScaleKind.PER_TENSOR:
        return "one scale for a tensor of fp8 pages"
    return None if lse is None and call.sinks is None and not spec.softcap else "no softcap, no sinks, no lse"


def prefill_attention(call: PrefillCall, out: torch.Tensor) -> None:
    """Fills out."""
    heads, group = call.spec.shape.heads, call.spec.group
    # [kv_heads, num_tokens, group, dim] as packed queries are.
    by_head = (out.shape[0], heads, group, out.shape[2])
    q = call.q if call.q.dim() == 4 else call.q.view(by_head).transpose(0, 1)
    packed_out = out.view(by_head).transpose(0, 1)
    chunks = [chunk for chunk in _chunks(call) if chunk.num_tokens]
    if not chunks:
        return
    mask = _mask(max(chunk.padded_stop - chunk.first_key(call.spec.window) for chunk in chunks), call)
    for chunk in chunks:
        rows = slice(chunk.row, chunk.row + chunk.num_tokens)
        packed_out[:, rows] = _attended(call, chunk, q[:, rows], mask)


class _Chunk(NamedTuple):
    """Queries of one sequence, its positions start .. stop, in the launch's rows from `row` on."""

    seq: int
    row: int
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    @property
    def first_block(self) -> int:
        return self.start // ROWS * ROWS

    @property
    def padded_stop(self) -> int:
        return -(-self.stop // ROWS) * ROWS

    def first_key(self, window: int) -> int:
        return _first_key(self.first_block, window)


def _chunks(call: PrefillCall) -> list[_Chunk]:
    q_bounds, k_bounds = call.cu_seqlens_q.tolist(), call.cu_seqlens_k.tolist()
    chunks = []
    for seq, (row, next_row) in enumerate(pairwise(q_bounds)):
        length, new = k_bounds[seq + 1] - k_bounds[seq], next_row - row
        if not 0 <= new <= call.max_seqlen_q or length < new:
            raise KernelArgumentError(
                f"sequence {seq}: {new} queries (max_seqlen_q {call.max_seqlen_q}) and {length} keys"
            )
        chunks.append(_Chunk(seq, row, length - new, length))
    return chunks


def _first_key(block: int, window: int) -> int:
    """The first key of the block at this position: what its first row sees, rounded down."""
    return visible_start(block, window) // ROWS * ROWS


def _mask(num_keys: int, call: PrefillCall) -> torch.Tensor:
    """What is added to the scores of a block, fp32 [ROWS * group, num_keys]; a block with n keys takes the last n."""
    query = torch.arange(ROWS).unsqueeze(1)
    key = torch.arange(ROWS - num_keys, ROWS)
    hidden = key > query
    if call.spec.window:
        hidden |= key <= query - call.spec.window
    mask = torch.zeros((ROWS, num_keys)).masked_fill_(hidden, float("-inf"))
    return mask.repeat_interleave(call.spec.group, dim=0)


def _attended(call: PrefillCall, chunk: _Chunk, q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Attention of a chunk's queries, [kv_heads, num_tokens, group, dim] like them."""
    spec, before = call.spec, chunk.start - chunk.first_block
    heads, dim = spec.shape.heads, spec.shape.dim
    low = chunk.first_key(spec.window)
    keys, values = _padded_span(call, chunk, low)
    blocks = pad(q, (0, 0, 0, 0, before, chunk.padded_stop - chunk.stop)).flatten(1, 2)
    parts = []
    for number, block in enumerate(range(chunk.first_block, chunk.padded_stop, ROWS)):
        rows = slice(number * ROWS * spec.group, (number + 1) * ROWS * spec.group)
        seen = slice(_first_key(block, spec.window) - low, block + ROWS - low)
        attended = scaled_dot_product_attention(
            blocks[:, rows].unsqueeze(0),
            keys[:, seen].unsqueeze(0),
            values[:, seen].unsqueeze(0),
            attn_mask=mask[:, mask.shape[1] - (seen.stop - seen.start) :],
            scale=spec.scale,
        )
        parts.append(attended.squeeze(0))
    attended = torch.cat(parts, dim=1).view(heads, -1, spec.group, dim)
    return attended[:, before : before + chunk.num_tokens]


def _padded_span(call: PrefillCall, chunk: _Chunk, low: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [kv_heads, padded_stop - low, dim] from a position on; zeros where no query of the chunk looks.

    What lies there was never written, or left the window and may belong to anyone; a masked NaN is still a NaN.
    """
    num_pages = -(-chunk.padded_stop // call.spec.shape.page_tokens)
    table = call.block_tables[chunk.seq]
    # Any page will do behind the end: what is read from it is overwritten here.
    table = pad(table[:num_pages], (0, num_pages - min(num_pages, table.shape[0])))
    span = scaled_span(call.k_pages, call.v_pages, table, low, chunk.padded_stop, call.spec)
    first_seen = visible_start(chunk.start, call.spec.window)
    for rows in span:
        rows[: first_seen - low] = 0.0
        rows[chunk.stop - low :] = 0.0
    keys, values = span
    return keys.transpose(0, 1), values.transpose(0, 1)
