"""top_logprobs: the log-probabilities of given tokens and of the best ones of each row, without sorting a row."""

from typing import NamedTuple

import torch

from kernels._checks import KV_DTYPES, check_dense, check_rows, check_tensor
from kernels.backend import Backend, uses_triton
from kernels.errors import KernelArgumentError
from kernels.top_logprobs import reference

__all__ = ["TopLogprobs", "top_logprobs"]


class TopLogprobs(NamedTuple):
    """Natural logs, fp32: of the given tokens [num_rows]; of the best ones [num_rows, count], best first, ids int32."""

    logprobs: torch.Tensor
    top_tokens: torch.Tensor
    top_logprobs: torch.Tensor


def top_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, count: int, *, backend: Backend = Backend.AUTO
) -> TopLogprobs:
    """Returns them for logits [num_rows, vocab_size] and tokens int32 [num_rows]; `count` is at most vocab_size.

    Of equal logits the lower token id is the better one.
    """
    check_tensor("logits", logits, (None, None), KV_DTYPES, logits.device)
    check_rows("logits", logits)
    num_rows, vocab_size = logits.shape
    check_dense("tokens", tokens, (num_rows,), (torch.int32,), logits.device)
    if not 0 <= count <= vocab_size or vocab_size == 0:
        raise KernelArgumentError(f"count: must be 0 .. {vocab_size}, is {count}")
    out = TopLogprobs(
        torch.empty(num_rows, dtype=torch.float32, device=logits.device),
        torch.empty(num_rows, count, dtype=torch.int32, device=logits.device),
        torch.empty(num_rows, count, dtype=torch.float32, device=logits.device),
    )
    if num_rows and uses_triton(backend, logits):
        from kernels.top_logprobs.triton import launch

        launch(logits, tokens, *out)
    elif num_rows:
        reference.top_logprobs(logits, tokens, *out)
    return out
