"""The materialised path on a CPU: keys and values of one sequence after the other, in blocks of ROWS positions.

Every product has a shape that a block's position decides: whole blocks, padded with zeros where the sequence ends or
the new tokens begin within one. So a token's bits depend neither on the cuts nor on other sequences.

    latents of a sequence    | ROWS | ROWS | ROWS .. 0 |     each block through kv_b by itself
    keys of a block          [0 ......... end of the block)
    queries                           [ROWS, of every head)

1,000 new tokens of 16 heads (512 + 64, 128 + 64, 128) take 97 ms on two AVX-512 cores, through the references 200.
"""

from itertools import pairwise

import torch
from torch.nn import functional

from kernels.backend import Backend
from kernels.errors import KernelArgumentError
from kernels.latent_dims import LatentDims
from kernels.mla.plan import MaterialisedRun

__all__ = ["materialise", "reason_against"]

ROWS = 32


def reason_against(q: torch.Tensor, backend: Backend) -> str | None:
    """Returns why a run goes through the ops; None where this takes it."""
    if backend is not Backend.AUTO:
        return f"backend {backend.name} was asked for"
    return None if q.device.type == "cpu" and q.dtype is torch.float32 else "queries and pages must be fp32 on a CPU"


def materialise(
    q: torch.Tensor,
    pages: torch.Tensor,
    kv_b: torch.Tensor,
    dims: LatentDims,
    run: MaterialisedRun,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Fills out with the attention of a run's queries; chunks only say how long its sequences are."""
    bounds = run.cu_seqlens_q.tolist()
    totals = torch.stack([chunk.cu_seqlens_k.diff() for chunk in run.chunks]).sum(0).tolist()
    mask = _mask(max([0, *totals]))
    for seq, (first, stop) in enumerate(pairwise(bounds)):
        total, new = totals[seq], stop - first
        if total < new:
            raise KernelArgumentError(f"sequence {seq}: {new} new tokens, but {total} latents")
        if new:
            keys, values = _keys_values(_latents(pages, run.block_tables[seq], total), kv_b, dims, q.shape[1])
            out[first:stop] = _attended(q[first:stop], keys, values, total, scale, mask)[..., : dims.value]


def _whole_blocks(tokens: int) -> int:
    return -(-tokens // ROWS) * ROWS


def _mask(tokens: int) -> torch.Tensor:
    """What is added to a block's scores [ROWS, whole blocks of tokens]; a block with n keys takes the last n."""
    num_keys = _whole_blocks(tokens)
    hidden = torch.arange(ROWS - num_keys, ROWS) > torch.arange(ROWS).unsqueeze(1)
    return torch.zeros((ROWS, num_keys)).masked_fill_(hidden, float("-inf"))


def _latents(pages: torch.Tensor, table: torch.Tensor, total: int) -> torch.Tensor:
    """A sequence's rows [whole blocks of total, width]; zeros behind its end, where pages hold anything."""
    _, page_tokens, width = pages.shape
    rows = pages.new_zeros((_whole_blocks(total), width))
    rows[:total] = pages.index_select(0, table[: -(-total // page_tokens)]).view(-1, width)[:total]
    return rows


def _keys_values(
    latents: torch.Tensor, kv_b: torch.Tensor, dims: LatentDims, heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [heads, tokens, dim], filled up with zeros to one dim: the library has a fast kernel for that."""
    dim = max(dims.head, dims.value)
    keys, values = (latents.new_zeros((latents.shape[0], heads, dim)) for _ in range(2))
    for block in range(0, latents.shape[0], ROWS):
        rows = slice(block, block + ROWS)
        kv = functional.linear(latents[rows, : dims.latent], kv_b).view(ROWS, heads, -1)
        keys[rows, :, : dims.nope] = kv[..., : dims.nope]
        values[rows, :, : dims.value] = kv[..., dims.nope :]
    keys[..., dims.nope : dims.head] = latents[:, None, dims.latent :]
    return keys.transpose(0, 1), values.transpose(0, 1)


def _attended(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, total: int, scale: float, mask: torch.Tensor
) -> torch.Tensor:
    """Attention [new, heads, dim] of a sequence's last queries q [new, heads, any]."""
    (new, heads, _), dim = q.shape, keys.shape[2]
    start = total - new
    first = start // ROWS * ROWS
    blocks = q.new_zeros((heads, keys.shape[1] - first, dim))
    blocks[:, start - first : total - first, : q.shape[2]] = q.transpose(0, 1)
    parts = []
    for block in range(first, keys.shape[1], ROWS):
        seen = block + ROWS
        attended = functional.scaled_dot_product_attention(
            blocks[None, :, block - first : seen - first],
            keys[None, :, :seen],
            values[None, :, :seen],
            attn_mask=mask[:, mask.shape[1] - seen :],
            scale=scale,
        )
        parts.append(attended.squeeze(0))
    return torch.cat(parts, dim=1)[:, start - first : total - first].transpose(0, 1)
