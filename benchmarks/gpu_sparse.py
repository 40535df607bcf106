"""What is measured of sparse attention over latents: an indexer's logits, its choice, attention over what is chosen,
all three beside dense latent attention, and what comes between an indexer's GEMMs and its logits.

The shapes are DeepSeek V3.2's: 64 index heads of 128, 2,048 tokens chosen, 128 heads on one card or the 16 that one of
eight cards holds. A case is decoding sequences, or one prompt's new tokens behind what it has cached.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from benchmarks.gpu_mla import LATENT, NOPE, PAGE, ROPE, SCALE, VALUE, WIDTH
from benchmarks.measurement import (
    GEMM,
    OUT_TOLERANCE,
    READ,
    ROUNDING,
    TOKENS,
    Maker,
    Measurement,
    Peer,
    difference,
    random,
    row_error,
    unequal,
)
from kernels.backend import Backend
from kernels.index_logits import index_logits
from kernels.key_rows import KeyRows, key_rows
from kernels.mla import MlaPath, mla_absorbed, mla_extend, mla_sparse, plan_extend
from kernels.mla_decode import MlaDecodePlan
from kernels.rotate_append_index import rotate_append_index
from kernels.sparse_latent_attention import sparse_latent_attention
from kernels.top_k import top_k

DEVICE = "cuda"
INDEX_HEADS, INDEX_DIM, TOP_K = 64, 128, 2048
INDEX_ROPE, MAX_POSITIONS, EPS = 64, 8192, 1e-6
# Of the rows that are compared with a reference, which takes one after the other.
SOME_ROWS = 16
# A logit is a sum of 64 products of 128, each rounded to 8 bits before.
LOGITS_TOLERANCE = 1e-3

DECODES = ((1, 65_536), (64, 8_192), (64, 65_536))
PROMPTS = ((0, 2_048), (14_336, 2_048), (63_488, 2_048))
HEADS = (128, 16)
NEW_TOKENS = (64, 2_048)


class Case(NamedTuple):
    """Sequences of `length` keys each; rows are their last new tokens."""

    name: str
    rows: KeyRows
    tables: torch.Tensor
    length: int

    @property
    def num_tokens(self) -> int:
        return self.rows.num_keys.shape[0]

    def pages(self, width: int) -> torch.Tensor:
        return random(self.tables.numel(), PAGE, width)

    def some(self) -> torch.Tensor:
        """Rows to compare: the first ones, the last ones and some between."""
        return torch.linspace(0, self.num_tokens - 1, min(SOME_ROWS, self.num_tokens), device=DEVICE).long()

    def at(self, rows: torch.Tensor) -> KeyRows:
        return KeyRows(*(part[rows] for part in self.rows))


def decoding(sequences: int, length: int) -> Case:
    lengths = torch.full((sequences,), length, dtype=torch.int32, device=DEVICE)
    none = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    return Case(f"B{sequences} L{length}", key_rows(lengths, none, none, sequences), tables(sequences, length), length)


def prompt(cached: int, new: int) -> Case:
    bounds = [torch.tensor([0, total], dtype=torch.int32, device=DEVICE) for total in (new, cached + new)]
    rows = key_rows(torch.zeros(0, dtype=torch.int32, device=DEVICE), *bounds, new)
    return Case(f"1 x ({cached} + {new})", rows, tables(1, cached + new), cached + new)


def tables(sequences: int, length: int) -> torch.Tensor:
    count = -(-length // PAGE)
    return torch.randperm(sequences * count, device=DEVICE).int().view(sequences, count)


def logits(make: partial[Case]) -> list[Measurement]:
    """TFLOP/s of the products."""
    case = make()
    q = random(case.num_tokens, INDEX_HEADS, INDEX_DIM)
    weights = random(case.num_tokens, INDEX_HEADS, dtype=torch.float32)
    pages = case.pages(INDEX_DIM)
    out = torch.full((case.num_tokens, case.length), float("nan"), device=DEVICE)
    call = partial(index_logits, q, weights, pages, case.tables, case.rows, case.length, out=out)

    def error() -> float:
        call()
        rows, blank = case.some(), torch.zeros(case.length, device=DEVICE)
        wanted = index_logits(
            q[rows], weights[rows], pages, case.tables, case.at(rows), case.length, backend=Backend.REFERENCE
        )
        seen = torch.arange(case.length, device=DEVICE) < case.rows.num_keys[rows].unsqueeze(1)
        return row_error(torch.where(seen, out[rows], blank), torch.where(seen, wanted, blank))

    amount = 2e-12 * int(case.rows.num_keys.sum()) * INDEX_HEADS * INDEX_DIM
    return [Measurement("index_logits", case.name, amount, call, error, LOGITS_TOLERANCE, ceiling=GEMM)]


def choice(make: partial[Case]) -> list[Measurement]:
    """GB/s of logits, each counted once, though several passes read them."""
    case = make()
    given = random(case.num_tokens, case.length, dtype=torch.float32)
    call = partial(top_k, given, case.rows.num_keys, TOP_K)

    def error() -> float:
        rows = case.some()
        wanted = top_k(given[rows], case.rows.num_keys[rows], TOP_K, backend=Backend.REFERENCE)
        return unequal(call()[rows], wanted)

    amount = 4e-9 * int(case.rows.num_keys.sum())
    peer = Peer("torch_topk", partial(torch.topk, given, min(TOP_K, case.length), sorted=False), amount)
    return [Measurement("top_k", case.name, amount, call, error, peers=(peer,), ceiling=READ)]


def attention(heads: int, make: partial[Case]) -> list[Measurement]:
    """TFLOP/s of both products over what is chosen."""
    case = make()
    q, pages = random(case.num_tokens, heads, WIDTH), case.pages(WIDTH)
    chosen = top_k(random(case.num_tokens, case.length, dtype=torch.float32), case.rows.num_keys, TOP_K)
    options = {"scale": SCALE, "latent": LATENT}
    call = partial(sparse_latent_attention, q, pages, case.tables, case.rows, chosen, **options)

    def error() -> float:
        rows = case.some()
        where = (case.tables, case.at(rows), chosen[rows])
        wanted = sparse_latent_attention(q[rows], pages, *where, **options, backend=Backend.REFERENCE)
        return row_error(call()[rows], wanted)

    pairs = int(case.rows.num_keys.clamp(max=TOP_K).sum())
    amount = 2e-12 * pairs * heads * (WIDTH + LATENT)
    name = f"{heads} heads {case.name}"
    return [Measurement("sparse_latent_attention", name, amount, call, error, OUT_TOLERANCE, ceiling=GEMM)]


def layer(heads: int, make: partial[Case]) -> list[Measurement]:
    """Thousands of tokens per second through logits, choice and attention; the peer is dense attention over everything.

    Where all are chosen both give the same; elsewhere the sparse one is held against its parts' references above.
    """
    case = make()
    index_q = random(case.num_tokens, INDEX_HEADS, INDEX_DIM)
    weights, keys = random(case.num_tokens, INDEX_HEADS, dtype=torch.float32), case.pages(INDEX_DIM)
    q, pages = random(case.num_tokens, heads, NOPE + ROPE), case.pages(WIDTH)
    kv_b = random(heads * (NOPE + VALUE), LATENT) * LATENT**-0.5
    dense = dense_layer(case, q, pages, kv_b)

    def call(k: int = TOP_K) -> torch.Tensor:
        where = (case.tables, case.rows)
        made = index_logits(index_q, weights, keys, *where, case.length, least_keys=k)
        return mla_sparse(q, pages, kv_b, *where, top_k(made, case.rows.num_keys, k))

    amount = 1e-3 * case.num_tokens

    def error() -> float:
        return row_error(call(case.length), dense())

    name, peers = f"{heads} heads {case.name}", (Peer("dense", dense, amount),)
    return [Measurement("sparse_latent_layer", name, amount, call, error, OUT_TOLERANCE, peers, TOKENS)]


def dense_layer(case: Case, q: torch.Tensor, pages: torch.Tensor, kv_b: torch.Tensor) -> partial[torch.Tensor]:
    """Returns what the worker runs for V3: decode absorbed, prompts materialised."""
    heads = q.shape[1]
    if case.tables.shape[0] == case.num_tokens:
        plan = MlaDecodePlan(case.num_tokens, case.length, heads)
        plan.prepare(case.rows.num_keys)
        return partial(mla_absorbed, q, pages, kv_b, case.tables, case.rows.num_keys, plan=plan)
    new, cached = case.num_tokens, case.length - case.num_tokens
    planned = plan_extend(case.tables, [new], [cached], heads, path=MlaPath.MATERIALISED)
    return partial(mla_extend, q, pages, kv_b, planned)


def append(tokens: int) -> list[Measurement]:
    """Returns GB/s over the bytes read and written; of queries only the rotated elements count."""
    q, k = random(tokens, INDEX_HEADS, INDEX_DIM), random(tokens, INDEX_DIM)
    norm, bias = random(INDEX_DIM), random(INDEX_DIM)
    pages, slots = random(-(-tokens // PAGE), PAGE, INDEX_DIM), torch.randperm(tokens, device=DEVICE)
    positions = torch.randint(0, MAX_POSITIONS, (tokens,), device=DEVICE)
    angles = torch.rand(MAX_POSITIONS, INDEX_ROPE // 2, device=DEVICE) * 6
    table = torch.stack((angles.cos(), angles.sin()), dim=1)
    options = {"norm": norm, "bias": bias, "eps": EPS}

    def error() -> float:
        made = [(q.clone(), torch.zeros_like(pages)) for _ in range(2)]
        for (turned, filled), backend in zip(made, (Backend.AUTO, Backend.REFERENCE), strict=True):
            rotate_append_index(turned, k, positions, table, filled, slots, **options, backend=backend)
        return max(difference(*pair) for pair in zip(*made, strict=True))

    call = partial(rotate_append_index, q, k, positions, table, pages, slots, **options)
    amount = 4e-9 * tokens * (INDEX_HEADS * INDEX_ROPE + INDEX_DIM)
    return [Measurement("rotate_append_index", f"{tokens} x {INDEX_HEADS} heads", amount, call, error, ROUNDING)]


CASES = (*(partial(decoding, *sizes) for sizes in DECODES), *(partial(prompt, *sizes) for sizes in PROMPTS))
AREAS: dict[str, tuple[Maker, ...]] = {
    "index_logits": tuple(partial(logits, case) for case in CASES),
    "top_k": tuple(partial(choice, case) for case in CASES),
    "sparse_attention": tuple(partial(attention, heads, case) for heads in HEADS for case in CASES),
    "sparse_layer": tuple(partial(layer, heads, case) for heads in HEADS for case in CASES),
    "sparse_rows": tuple(partial(append, tokens) for tokens in NEW_TOKENS),
}
