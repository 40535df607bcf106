"""compress_tokens in plain torch: raw rows into pages, then every entry from what pages hold."""

import torch

from kernels.backend import Backend
from kernels.compress_tokens.call import CompressCall
from kernels.key_rows import append_rows
from kernels.rms_norm import rms_norm
from kernels.rotation.reference import turned_tail


def compress_tokens(call: CompressCall) -> None:
    """Fills the slots and the entries."""
    append_rows(call.raw, call.raw_pages, call.raw_slots)
    rows, rule = call.rows, call.rule
    ends = (rows.num_keys > 0) & (rows.num_keys % rule.ratio == 0)
    sequences, entries = rows.sequences[ends].long(), rows.num_keys[ends].long() // rule.ratio - 1
    if entries.numel() == 0:
        return
    made = _weighted(call, sequences, entries)
    normed = rms_norm(made, rule.norm.float(), rule.eps, backend=Backend.REFERENCE).to(call.raw.dtype)
    cos, sin = rule.cos_sin.index_select(0, entries * rule.ratio).unsqueeze(2).unbind(1)
    of_page = call.entry_pages.shape[1]
    pages = call.entry_tables.long()[sequences, entries // of_page]
    call.entry_pages[pages, entries % of_page] = turned_tail(normed.unsqueeze(1), cos, sin).squeeze(1)


def _weighted(call: CompressCall, sequences: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
    """Returns the weighted sums of these entries' blocks, fp32 [n, dim]."""
    ratio, overlap, bias = call.rule.ratio, call.rule.overlap, call.rule.bias
    offsets = torch.arange(-ratio if overlap else 0, ratio, device=entries.device)
    positions = entries.unsqueeze(1) * ratio + offsets
    before = (positions < 0).unsqueeze(-1)
    places, page_tokens = positions.clamp(min=0), call.raw_pages.shape[1]
    pages = call.raw_tables.long()[sequences.unsqueeze(1), places // page_tokens]
    values, gates = call.raw_pages[pages, places % page_tokens].float().chunk(2, dim=-1)
    biases = bias.repeat(2, 1)[-offsets.shape[0] :].unsqueeze(0)
    gates = _of_blocks(gates, ratio, overlap) + _of_blocks(biases, ratio, overlap)
    weights = gates.masked_fill(before, -torch.inf).softmax(dim=1)
    return (_of_blocks(values, ratio, overlap).masked_fill(before, 0.0) * weights).sum(dim=1)


def _of_blocks(rows: torch.Tensor, ratio: int, overlap: bool) -> torch.Tensor:
    """Of rows [n, tokens, width] what goes into an entry: of the block before the first half, of its own the second."""
    if not overlap:
        return rows
    dim = rows.shape[-1] // 2
    return torch.cat((rows[:, :ratio, :dim], rows[:, ratio:, dim:]), dim=1)
