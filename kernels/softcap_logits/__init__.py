"""softcap_logits: final logits bent into (-cap, cap), as Gemma 2 does before it samples.

An op of its own rather than an option of `sample_tokens`: log-probabilities need the same logits.
"""

import torch

from kernels._checks import KV_DTYPES, check_disjoint, check_rows, check_tensor
from kernels.backend import Backend, uses_triton
from kernels.errors import KernelArgumentError
from kernels.softcap_logits import reference

__all__ = ["softcap_logits"]


def softcap_logits(
    logits: torch.Tensor, cap: float, *, out: torch.Tensor | None = None, backend: Backend = Backend.AUTO
) -> torch.Tensor:
    """cap * tanh(logits / cap) of rows [num_rows, vocab_size], in fp32 and rounded once.

    Rows may be slices of wider ones. `out` has the logits' shape and dtype, and may be the logits themselves.
    """
    check_tensor("logits", logits, (None, None), KV_DTYPES, logits.device)
    check_rows("logits", logits)
    if not cap > 0.0:
        raise KernelArgumentError(f"cap: must be positive, got {cap}")
    if out is None:
        out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    elif out is not logits:
        check_tensor("out", out, logits.shape, (logits.dtype,), logits.device)
        check_rows("out", out)
        check_disjoint("out", out, "logits", logits)
    if logits.numel() and uses_triton(backend, logits):
        from kernels.softcap_logits.triton import launch

        launch(logits, cap, out)
    else:
        reference.softcap_logits(logits, cap, out)
    return out
