"""sparse_latent_attention in plain torch: one query after the other, in fp32."""

from collections.abc import Iterator

import torch

from kernels.key_rows import positions_in_pages
from kernels.sparse_latent_attention.call import SparseLatentCall


def sparse_latent_attention(call: SparseLatentCall, out: torch.Tensor) -> None:
    """Fills out; a query that sees nothing gives 0."""
    for token, rows in chosen_rows(call):
        latents = rows.float()
        weights = torch.softmax(call.q[token].float() * call.scale @ latents.T, dim=-1)
        out[token] = (weights @ latents[:, : call.latent]).to(out.dtype)


def chosen_rows(call: SparseLatentCall) -> Iterator[tuple[int, torch.Tensor]]:
    """Each query's number and its chosen rows of pages [n, width]."""
    pairs = zip(call.rows.sequences.tolist(), call.rows.num_keys.tolist(), strict=True)
    for token, (sequence, count) in enumerate(pairs):
        positions = call.chosen[token, :count]
        # Without a key nothing is read, of no sequence.
        yield token, positions_in_pages(call.pages, call.block_tables[sequence], positions.long())
