"""compressed_attention in plain torch: one query after the other, in fp32."""

from collections.abc import Iterator

import torch

from kernels.compressed_attention.call import CompressedCall
from kernels.key_rows import positions_in_pages


def compressed_attention(call: CompressedCall, out: torch.Tensor) -> None:
    """Fills out; a query that sees nothing gives 0."""
    for token, rows in keys_of_rows(call):
        if rows.shape[0] == 0:
            out[token] = 0.0
            continue
        keys = rows.float()
        scores = torch.cat((call.q[token].float() @ keys.T * call.scale, call.sinks.unsqueeze(1)), dim=1)
        out[token] = (scores.softmax(dim=1)[:, :-1] @ keys).to(out.dtype)


def keys_of_rows(call: CompressedCall) -> Iterator[tuple[int, torch.Tensor]]:
    """Each query's number and the rows of pages that it reads [n, dim]: its window, then entries."""
    pairs = zip(call.rows.sequences.tolist(), call.rows.num_keys.tolist(), strict=True)
    for token, (sequence, count) in enumerate(pairs):
        # Without a key nothing is read, of no sequence.
        positions = torch.arange(max(count - call.window_tokens, 0), count, device=call.q.device)
        keys = positions_in_pages(call.window_pages, call.window_tables[sequence], positions)
        seen = 0 if call.entries is None else count // call.entries.ratio
        if call.entries is not None and seen:
            entries, chosen = torch.arange(seen, device=call.q.device), call.entries.chosen
            if chosen is not None:
                entries = chosen[token, :seen].long()
            keys = torch.cat((keys, positions_in_pages(call.entries.pages, call.entries.tables[sequence], entries)))
        yield token, keys
