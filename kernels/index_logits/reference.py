"""index_logits in plain torch: one query after the other, in fp32."""

import torch

from kernels.errors import KernelArgumentError
from kernels.index_logits.call import IndexLogitsCall
from kernels.key_rows import positions_in_pages


def index_logits(call: IndexLogitsCall, out: torch.Tensor) -> None:
    """Fills what the rows see."""
    pairs = zip(call.rows.sequences.tolist(), call.rows.num_keys.tolist(), strict=True)
    for token, (sequence, count) in enumerate(pairs):
        check_count(token, count, call.max_keys)
        if count <= call.least_keys:
            continue
        scores = torch.einsum("hd,kd->hk", call.q[token].float(), read_keys(call, sequence, count))
        out[token, :count] = torch.einsum("h,hk->k", call.weights[token], scores.relu())


def check_count(token: int, count: int, max_keys: int) -> None:
    if not 0 <= count <= max_keys:
        raise KernelArgumentError(f"row {token}: sees {count} keys (max_keys {max_keys})")


def read_keys(call: IndexLogitsCall, sequence: int, count: int) -> torch.Tensor:
    """The first `count` keys [count, dim] of a sequence in fp32, times their scales where they have some."""
    positions = torch.arange(count, device=call.q.device)
    keys = positions_in_pages(call.pages, call.block_tables[sequence], positions).float()
    if call.scales is None:
        return keys
    return keys * positions_in_pages(call.scales, call.block_tables[sequence], positions).unsqueeze(1)
