"""gather_latent in plain torch: one token after the other.

A sequence is a row of the block table and a length.
"""

import torch


def gather_latent(
    pages: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    new_latents: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    first_positions: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Fills out's rows up to cu_seqlens_k's end."""
    page_tokens = pages.shape[1]
    for seq in range(block_tables.shape[0]):
        row, stop = int(cu_seqlens_k[seq]), int(cu_seqlens_k[seq + 1])
        first_new = 0 if cu_seqlens_q is None else int(cu_seqlens_q[seq])
        num_new = 0 if cu_seqlens_q is None else int(cu_seqlens_q[seq + 1]) - first_new
        position = torch.arange(stop - row - num_new, device=pages.device)
        if first_positions is not None:
            position = position + int(first_positions[seq])
        page = block_tables[seq].long()[position // page_tokens]
        out[row : stop - num_new] = pages[page, position % page_tokens]
        if new_latents is not None:
            out[stop - num_new : stop] = new_latents[first_new : first_new + num_new]
