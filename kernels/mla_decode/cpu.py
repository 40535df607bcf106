"""mla_decode on a CPU: torch's scaled_dot_product_attention, one sequence after the other.

A sequence's latents decide the shape of each product and of each sum, so its bits depend on nothing else. Rows are
passed as keys and as values: the rotary part of a result is computed and dropped, which costs less than a copy.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels.errors import KernelArgumentError
from kernels.mla_decode.call import MlaDecodeCall


def reason_against(call: MlaDecodeCall, lse: torch.Tensor | None) -> str | None:
    """Why the reference has to take the case; None where this does."""
    if call.q.device.type != "cpu" or call.q.dtype is not torch.float32:
        return "queries and pages must be fp32 on a CPU"
    return None if lse is None and call.cu_seqlens_q is None else "one token of each sequence, without its lse"


def mla_decode(call: MlaDecodeCall, out: torch.Tensor) -> None:
    """Fills out; a sequence without latents gives 0."""
    page_tokens, width = call.pages.shape[1:]
    for seq, length in enumerate(call.seqlens_k.tolist()):
        if not 0 <= length <= call.max_seqlen_k:
            raise KernelArgumentError(f"sequence {seq}: {length} latents (max_seqlen_k {call.max_seqlen_k})")
        if length == 0:
            out[seq] = 0.0
            continue
        table = call.block_tables[seq, : -(-length // page_tokens)]
        rows = call.pages.index_select(0, table).view(1, 1, -1, width)[:, :, :length]
        attended = scaled_dot_product_attention(call.q[None, None, seq], rows, rows, scale=call.scale)
        out[seq] = attended[0, 0, :, : call.latent]
