"""index_logits on a CPU: two products a query, over keys that are read once for a sequence.

The keys that a query sees decide the shape of each product, so its bits depend neither on other sequences nor on how
many queries its own has.
"""

from itertools import groupby

import torch

from kernels.fp8 import E4M3
from kernels.index_logits.call import IndexLogitsCall
from kernels.index_logits.reference import check_count, read_keys


def reason_against(call: IndexLogitsCall) -> str | None:
    """Returns why the reference has to take the case; None where this does."""
    is_taken = call.q.device.type == "cpu" and call.q.dtype in (torch.float32, E4M3)
    return None if is_taken else "queries must be fp32 or fp8 on a CPU"


def index_logits(call: IndexLogitsCall, out: torch.Tensor) -> None:
    """Fills what the rows see."""
    counts = call.rows.num_keys.tolist()
    for sequence, group in groupby(enumerate(call.rows.sequences.tolist()), key=lambda row: row[1]):
        tokens = [token for token, _ in group]
        # Rows of a sequence are in the order of their positions.
        most = counts[tokens[-1]]
        if most <= call.least_keys:
            continue
        check_count(tokens[-1], most, call.max_keys)
        keys = read_keys(call, sequence, most)
        for token in tokens:
            if (count := counts[token]) > call.least_keys:
                scores = (keys[:count] @ call.q[token].float().T).relu_()
                torch.mv(scores, call.weights[token], out=out[token, :count])
