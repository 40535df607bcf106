"""What is measured of compressed attention: a window of 128 tokens and compressed entries at 65,536 tokens of context,
beside dense attention of the same heads over all of them.

The shapes are DeepSeek V4's: 64 or 128 heads of 512, of which a key is its value; of 16,384 entries (CSA) 512 or 1,024
are chosen, of 512 (HCA) all are read. Dense are mla_decode, whose keys are 64 elements wider than its values, and the
op itself with a window over everything.
"""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.gpu_mla import WIDTH
from benchmarks.gpu_sparse import DEVICE, Case, decoding, prompt
from benchmarks.measurement import OUT_TOLERANCE, TOKENS, Maker, Measurement, Peer, random, row_error
from kernels.backend import Backend
from kernels.compressed_attention import compressed_attention
from kernels.mla_decode import MlaDecodePlan, mla_decode
from kernels.top_k import top_k

DIM, PAGE, WINDOW, LENGTH = 512, 128, 128, 65_536
SCALE = DIM**-0.5
# Tokens of an entry, and how many entries are chosen; 0: all are read.
KINDS = {"CSA 512": (4, 512), "CSA 1024": (4, 1024), "HCA": (128, 0)}
HEADS = (128, 64)
DECODES = tuple(partial(decoding, sequences, LENGTH) for sequences in (1, 64))
CASES = (*DECODES, partial(prompt, LENGTH - 2_048, 2_048))


def attention(kind: str, heads: int, make: partial[Case]) -> list[Measurement]:
    """Thousands of tokens per second."""
    case, (ratio, k) = make(), KINDS[kind]
    q, sinks = random(case.num_tokens, heads, DIM), random(heads, dtype=torch.float32)
    window, entries = paged(case, 1), paged(case, ratio)
    seen = case.rows.entries(ratio).num_keys
    chosen = top_k(random(case.num_tokens, LENGTH // ratio, dtype=torch.float32), seen, k) if k else None
    options = {"scale": SCALE, "window_tokens": WINDOW, "entry_pages": entries[0], "entry_tables": entries[1]}
    options |= {"ratio": ratio}
    call = partial(compressed_attention, q, *window, case.rows, sinks, **options, chosen=chosen)

    def error() -> float:
        rows = case.some()
        some = None if chosen is None else chosen[rows]
        reference = {**options, "chosen": some, "backend": Backend.REFERENCE}
        return row_error(call()[rows], compressed_attention(q[rows], *window, case.at(rows), sinks, **reference))

    amount = 1e-3 * case.num_tokens
    peers = ()
    if case.tables.shape[0] == case.num_tokens:
        whole = partial(compressed_attention, q, *window, case.rows, sinks, scale=SCALE, window_tokens=LENGTH)
        peers = (Peer("mla_decode", dense(case, heads), amount), Peer("window_of_all", whole, amount))
    name = f"{kind}, {heads} heads {case.name}"
    return [Measurement("compressed_attention", name, amount, call, error, OUT_TOLERANCE, peers, TOKENS)]


def paged(case: Case, ratio: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages and tables of a row for each `ratio` tokens of every sequence."""
    sequences, count = case.tables.shape[0], -(-case.length // PAGE)
    tables = torch.randperm(sequences * count, device=DEVICE).int().view(sequences, count)
    return random(sequences * count, PAGE // ratio, DIM), tables


def dense(case: Case, heads: int) -> partial[torch.Tensor]:
    """Returns decode over all tokens by the kernel for latents of 512 + 64."""
    plan = MlaDecodePlan(case.num_tokens, case.length, heads)
    plan.prepare(case.rows.num_keys)
    q, pages = random(case.num_tokens, heads, WIDTH), case.pages(WIDTH)
    return partial(mla_decode, q, pages, case.tables, case.rows.num_keys, scale=WIDTH**-0.5, plan=plan)


AREAS: dict[str, tuple[Maker, ...]] = {
    "compressed": tuple(partial(attention, kind, heads, case) for case in CASES for heads in HEADS for kind in KINDS)
}
