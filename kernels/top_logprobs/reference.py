"""top_logprobs in plain torch."""

import torch

_LARGEST_ID = 0xFFFFFFFF


def top_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, out: torch.Tensor, top_tokens: torch.Tensor, top_values: torch.Tensor
) -> None:
    """Fills out, top_tokens and top_values."""
    logits = logits.float()
    logprobs = logits.log_softmax(dim=-1)
    out.copy_(logprobs.gather(1, tokens.long().unsqueeze(1)).squeeze(1))
    count = top_tokens.shape[1]
    if count:
        best = _ranked_keys(logits).topk(count, dim=-1).values
        ids = _LARGEST_ID - (best & _LARGEST_ID)
        top_tokens.copy_(ids)
        top_values.copy_(logprobs.gather(1, ids))


def _ranked_keys(logits: torch.Tensor) -> torch.Tensor:
    """int64, no two alike: in the order of the logits, of equals the lower id is larger. topk alone keeps no order."""
    bits = (logits + 0.0).view(torch.int32)  # -0 becomes 0
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    return (order << 32) + (_LARGEST_ID - torch.arange(logits.shape[-1], device=logits.device))
