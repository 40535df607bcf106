"""sample_tokens: one token per row of logits, with penalties, temperature, top-k, top-p, min-p and a seed per row.

A row's token depends on its own logits, parameters and counts alone, and its noise on the key and the token id, so a
seed draws the same tokens in any batch.
"""

import torch

from kernels._checks import KV_DTYPES, check_dense, check_rows, check_tensor, checked_out
from kernels.backend import Backend, uses_triton
from kernels.errors import KernelArgumentError
from kernels.sample_tokens import reference
from kernels.sample_tokens.params import SamplingTensors, TokenCounts

__all__ = ["SamplingTensors", "TokenCounts", "sample_tokens"]

_INT_FIELDS = {"top_k": torch.int32, "slots": torch.int32, "key_low": torch.int64, "key_high": torch.int64}


def sample_tokens(
    logits: torch.Tensor,
    params: SamplingTensors,
    counts: TokenCounts | None = None,
    *,
    out: torch.Tensor | None = None,
    backend: Backend = Backend.AUTO,
) -> torch.Tensor:
    """Returns int32 [num_rows]: a token of each row of logits [num_rows, vocab_size], the best one at temperature 0.

    Of equal scores the lower token id is the better one. top-k, then top-p of what it leaves, then min-p remove tokens;
    the best one stays. Without `counts` no row has penalties. With them, each row's newest token is counted first,
    unless it is: a launch that is repeated gives the same tokens. No two rows may have the same slot.
    """
    check_tensor("logits", logits, (None, None), KV_DTYPES, logits.device)
    check_rows("logits", logits)
    num_rows, vocab_size = logits.shape
    if vocab_size == 0:
        raise KernelArgumentError("logits: the vocabulary is empty")
    for name, values in params._asdict().items():
        check_dense(name, values, (num_rows,), (_INT_FIELDS.get(name, torch.float32),), logits.device)
    if counts is not None:
        _check_counts(counts, num_rows, vocab_size, logits.device)
    out = checked_out(out, (num_rows,), torch.int32, logits.device, logits=logits)
    if num_rows and uses_triton(backend, logits):
        from kernels.sample_tokens.triton import launch

        launch(logits, params, counts, out)
    elif num_rows:
        reference.sample_tokens(logits, params, counts, out)
    return out


def _check_counts(counts: TokenCounts, num_rows: int, vocab_size: int, device: torch.device) -> None:
    check_dense("counts", counts.counts, (None, vocab_size + 1), (torch.int32,), device)
    num_tokens = counts.token_ids.shape[0]
    sizes = {"token_ids": num_tokens, "positions": num_tokens, "rows": num_rows}
    for name, size in sizes.items():
        values = getattr(counts, name)
        check_dense(name, values, (size,), (torch.int32,), device)
