"""Which rows of a launch an indexer chooses for at a time: logits over all keys are large, so few rows have them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kernels.top_k import WORKSPACE_BYTES
from worker_service.model.attention_specs import IndexSpec
from worker_service.model.launch_inputs import LaunchInputs

# The most bytes of logits, and the most queries, that are chosen from at a time.
LOGITS_BYTES = 256 << 20
MOST_ROWS = 1024
# index_logits reads a block of keys once for this many rows, so parts are multiples of it.
SHARING_ROWS = 64
# Memory of choices beside the pools: fp32 logits and the workspace of their top_k, once for captured launches, whose
# memory is their own, and once for the others.
CHOICE_BYTES = 2 * LOGITS_BYTES // 4 * (4 + WORKSPACE_BYTES)


def index_query_bytes(index: IndexSpec, dtype: torch.dtype, key_dtype: torch.dtype | None = None) -> int:
    """Returns the bytes of a token's index queries and of their heads' weights, as the GEMMs made them in `dtype`, and
    of the rounded ones beside them where keys are of `key_dtype`."""
    dtypes = (dtype,) if key_dtype is None else (dtype, key_dtype)
    return sum(index.num_heads * (index.head_dim * made.itemsize + torch.float32.itemsize) for made in dtypes)


def choice_parts(launch: LaunchInputs, ratio: int = 1) -> Iterator[tuple[slice, int]]:
    """Yields rows whose logits fit in the workspace, and a bound of the keys that they see, each of `ratio` tokens.

    Decode rows come first, prompts and padding behind them. A captured launch has the bounds that it was captured for:
    which rows are chosen for at a time changes no bit.
    """
    prompt_keys = min(launch.max_prompt_keys or launch.max_seqlen_k, launch.max_seqlen_k)
    for first, end, tokens in (
        (0, launch.num_decode, launch.max_seqlen_k),
        (launch.num_decode, launch.token_ids.shape[0], prompt_keys),
    ):
        width = max(tokens // ratio, 1)
        step = rows_at_once(width)
        for start in range(first, end, step):
            yield slice(start, min(start + step, end)), width


def rows_at_once(width: int) -> int:
    """Returns how many rows of `width` logits are chosen from at a time."""
    rows = min(max(LOGITS_BYTES // (4 * width), 1), MOST_ROWS)
    return rows - rows % SHARING_ROWS if rows > SHARING_ROWS else rows
