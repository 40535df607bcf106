"""sparse_latent_attention on a CPU: torch's scaled_dot_product_attention, one query after the other.

How many latents a query has decides the shape of each product and of each sum, so its bits depend on no other query.
Rows are passed as keys and as values: the rotary part of a result is computed and dropped, which costs less than a
copy.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels.sparse_latent_attention.call import SparseLatentCall
from kernels.sparse_latent_attention.reference import chosen_rows


def reason_against(call: SparseLatentCall) -> str | None:
    """Returns why the reference has to take the case; None where this does."""
    return None if call.q.device.type == "cpu" and call.q.dtype is torch.float32 else "queries must be fp32 on a CPU"


def sparse_latent_attention(call: SparseLatentCall, out: torch.Tensor) -> None:
    """Fills out; a query that sees nothing gives 0."""
    for token, rows in chosen_rows(call):
        if rows.shape[0] == 0:
            out[token] = 0.0
            continue
        keys = rows[None, None]
        attended = scaled_dot_product_attention(call.q[token][None, None], keys, keys, scale=call.scale)
        out[token] = attended[0, 0, :, : call.latent]
