"""The plan of prompts whose lengths lie on the device: one materialised run in chunks, fit for a captured graph.

Nothing is read back and nothing uploaded; what the host says are bounds. A launch captured with it replays any batch
whose tensors were refilled within them. On Hopper the projection computes the latents that there are; elsewhere as many
as the bounds say, so a caller with short prompts captures several bounds.

    latents of all sequences    |0 0 0 0 0 0 0 0 0|1 1 1|2 2 2 2 2 2|
    chunks of chunk_tokens      |======= 0 =====|======= 1 =========|

Between two chunks one sequence at most is cut: at a multiple of BLOCK of its own positions, where a softmax can be
carried on bit by bit. So a chunk has up to BLOCK - 1 latents more.
"""

from collections.abc import Sequence

import torch

from kernels._checks import check_block_tables, check_lengths, num_sequences
from kernels.errors import KernelArgumentError
from kernels.mla.plan import CHUNK_TOKENS, Chunk, ExtendPlan, MaterialisedRun
from kernels.mla_prefill import BLOCK, MlaPrefillPlan

__all__ = ["num_chunks", "plan_on_device"]


def plan_on_device(
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    heads: int,
    *,
    num_tokens: int,
    num_latents: int,
    chunk_tokens: int = CHUNK_TOKENS,
    prefill_plans: Sequence[MlaPrefillPlan] = (),
) -> ExtendPlan:
    """Returns the plan for mla_extend of num_tokens rows of q, all on the materialised path; made anew each step.

    cu_seqlens_q and cu_seqlens_k int32 [num_seqs + 1] count new tokens, and cached and new ones; a sequence without
    either is padding, and so are rows behind the last token, whose result is not written. num_latents bounds
    cu_seqlens_k's end. About chunk_tokens latents are projected at a time. prefill_plans hold the buffers of as many
    chunks, made once for the largest batch, and are prepared here; none: each layer's attention makes its own.
    """
    num_seqs = num_sequences(cu_seqlens_q, "cu_seqlens_q")
    device = block_tables.device
    check_block_tables(block_tables, num_seqs, device)
    check_lengths("cu_seqlens_q", cu_seqlens_q, num_seqs + 1, device)
    check_lengths("cu_seqlens_k", cu_seqlens_k, num_seqs + 1, device)
    if num_tokens < 0 or num_latents < num_tokens:
        raise KernelArgumentError(f"num_latents: must cover the {num_tokens} new tokens, got {num_latents}")
    if chunk_tokens < BLOCK:
        raise KernelArgumentError(f"chunk_tokens: must be at least {BLOCK}, got {chunk_tokens}")
    count = num_chunks(num_latents, chunk_tokens)
    if prefill_plans:
        if len(prefill_plans) < count:
            raise KernelArgumentError(f"prefill_plans: {count} chunks need as many, got {len(prefill_plans)}")
        most = min(plan.max_tokens for plan in prefill_plans)
        if num_tokens > most:
            raise KernelArgumentError(f"prefill_plans: hold {most} tokens, got num_tokens {num_tokens}")
    if count == 1:
        # From position 0 on: a query's place among its keys follows from the two lengths.
        parts = [(None, cu_seqlens_k, None)]
    else:
        parts = list(zip(*_parts(cu_seqlens_q, cu_seqlens_k, count, chunk_tokens), strict=True))
    bound = num_latents if count == 1 else chunk_tokens + BLOCK
    chunks = []
    for index, (firsts, cu_k, offsets) in enumerate(parts):
        plan = prefill_plans[index] if prefill_plans else None
        if plan is not None:
            plan.prepare(cu_seqlens_q, cu_k, offsets)
        chunks.append(Chunk(firsts, cu_k, offsets, bound, plan))
    run = MaterialisedRun(0, num_tokens, block_tables, cu_seqlens_q, num_tokens, tuple(chunks))
    return ExtendPlan(num_tokens, heads, (run,))


def num_chunks(num_latents: int, chunk_tokens: int) -> int:
    """Returns how many chunks a plan on the device has."""
    return max(-(-num_latents // chunk_tokens), 1)


def _parts(
    cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, count: int, chunk_tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns of each chunk the first positions [count, num_seqs], the running sums of latents [count, num_seqs + 1],
    and the places of the first queries."""
    lengths = cu_seqlens_k.diff()
    bounds = torch.arange(count + 1, dtype=torch.int32, device=lengths.device)[:, None] * chunk_tokens
    reached = (bounds - cu_seqlens_k[:-1]).clamp_min(0)
    cuts = torch.where(reached < lengths, reached // BLOCK * BLOCK, lengths)
    # Each row begins at a multiple of 16 bytes: where one begins must not mean another compilation.
    width = -(-(lengths.shape[0] + 1) // 4) * 4
    firsts, sums, offsets = lengths.new_zeros(3, count, width)
    firsts[:, : lengths.shape[0]] = cuts[:-1]
    torch.cumsum(cuts[1:] - cuts[:-1], 1, dtype=torch.int32, out=sums[:, 1 : lengths.shape[0] + 1])
    offsets[:, : lengths.shape[0]] = lengths - cu_seqlens_q.diff() - cuts[:-1]
    return firsts[:, : lengths.shape[0]], sums[:, : lengths.shape[0] + 1], offsets[:, : lengths.shape[0]]
