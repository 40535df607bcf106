"""The plan of prompts whose lengths lie on the device: one materialised run of one chunk, fit for a captured graph.

Nothing is read back and nothing uploaded; what the host says are bounds. A launch captured with it replays any batch
whose tensors were refilled within them. On Hopper the projection computes the latents that there are; elsewhere as many
as the bound says, so a caller with short prompts captures several bounds.
"""

import torch

from kernels._checks import check_block_tables, check_lengths, num_sequences
from kernels.errors import KernelArgumentError
from kernels.mla.plan import Chunk, ExtendPlan, MaterialisedRun
from kernels.mla_prefill import MlaPrefillPlan

__all__ = ["plan_on_device"]


def plan_on_device(
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    heads: int,
    *,
    num_tokens: int,
    num_latents: int,
    prefill_plan: MlaPrefillPlan | None = None,
) -> ExtendPlan:
    """Returns the plan for mla_extend of num_tokens rows of q, all on the materialised path; made anew each step.

    cu_seqlens_q and cu_seqlens_k int32 [num_seqs + 1] count new tokens, and cached and new ones; a sequence without
    either is padding, and so are rows behind the last token, whose result is not written. num_latents bounds
    cu_seqlens_k's end. prefill_plan holds the buffers, made once for the largest batch, and is prepared here; None:
    each layer's attention makes its own.
    """
    num_seqs = num_sequences(cu_seqlens_q, "cu_seqlens_q")
    device = block_tables.device
    check_block_tables(block_tables, num_seqs, device)
    check_lengths("cu_seqlens_q", cu_seqlens_q, num_seqs + 1, device)
    check_lengths("cu_seqlens_k", cu_seqlens_k, num_seqs + 1, device)
    if num_tokens < 0 or num_latents < num_tokens:
        raise KernelArgumentError(f"num_latents: must cover the {num_tokens} new tokens, got {num_latents}")
    if prefill_plan is not None:
        if num_tokens > prefill_plan.max_tokens:
            raise KernelArgumentError(
                f"prefill_plan: holds {prefill_plan.max_tokens} tokens, got num_tokens {num_tokens}"
            )
        prefill_plan.prepare(cu_seqlens_q, cu_seqlens_k)
    # One chunk from position 0 on: a query's place among its keys follows from the two lengths.
    chunk = Chunk(None, cu_seqlens_k, None, num_latents, prefill_plan)
    run = MaterialisedRun(0, num_tokens, block_tables, cu_seqlens_q, num_tokens, (chunk,))
    return ExtendPlan(num_tokens, heads, (run,))
