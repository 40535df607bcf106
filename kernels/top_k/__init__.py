"""top_k: the positions of each row's k largest logits, in ascending order; of equal ones the lowest are chosen.

No row is sorted and nothing is added up atomically: a row's choice is a function of its logits alone.
"""

import torch

from kernels._checks import check_lengths, check_rows, check_tensor, checked_out
from kernels.backend import Backend, choose_backend
from kernels.errors import KernelArgumentError
from kernels.top_k import hopper, reference

__all__ = ["MAX_COLUMNS", "WORKSPACE_BYTES", "top_k"]

# Twenty bits of a position, as many as the longest contexts of models with an indexer.
MAX_COLUMNS = 1 << 20
# Of a logit, on a GPU: its key and its position, where it may be one of the largest.
WORKSPACE_BYTES = 8


def top_k(
    logits: torch.Tensor,
    num_keys: torch.Tensor,
    k: int,
    *,
    out: torch.Tensor | None = None,
    backend: Backend = Backend.AUTO,
) -> torch.Tensor:
    """Returns int32 [num_rows, k]: positions, then -1 where a row has fewer.

    logits fp32 [num_rows, max_keys]; num_keys int32 [num_rows]: how many of a row's first logits count. A row of at
    most k has all of them chosen, and its logits are not read. A NaN ranks as minus infinity, -0 as 0.
    """
    check_tensor("logits", logits, (None, None), (torch.float32,), logits.device)
    check_rows("logits", logits)
    num_rows, width = logits.shape
    check_lengths("num_keys", num_keys, num_rows, logits.device)
    if k < 1:
        raise KernelArgumentError(f"k: must be at least 1, got {k}")
    if width > MAX_COLUMNS:
        raise KernelArgumentError(f"logits: rows must be of at most {MAX_COLUMNS}, got {width}")
    out = checked_out(out, (num_rows, k), torch.int32, logits.device)
    if num_rows == 0:
        return out
    route = choose_backend(backend, logits, lambda: hopper.reason_against(logits, k))
    if route is Backend.GLUON:
        from kernels.top_k.hopper.launch import launch as launch_gluon

        launch_gluon(logits, num_keys, out)
    elif route is Backend.TRITON:
        from kernels.top_k.triton import launch

        launch(logits, num_keys, out)
    else:
        reference.top_k(logits, num_keys, out)
    return out
