"""What is measured of sparse attention over latents: an indexer's logits, its choice, attention over what is chosen,
all three beside dense latent attention, and what comes between an indexer's GEMMs and its logits.

The shapes are DeepSeek V3.2's: 64 index heads of 128, 2,048 tokens chosen, 128 heads on one card or the 16 that one of
eight cards holds. A case is decoding sequences, or one prompt's new tokens behind what it has cached.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch

from benchmarks.gpu_layers import in_a_model
from benchmarks.gpu_mla import LATENT, NOPE, PAGE, ROPE, SCALE, VALUE, WIDTH
from benchmarks.measurement import (
    GEMM,
    OUT_TOLERANCE,
    READ,
    ROUNDING,
    TOKENS,
    Ceiling,
    Maker,
    Measurement,
    Peer,
    difference,
    random,
    row_error,
    unequal,
)
from kernels.backend import Backend
from kernels.fp8 import E4M3, quantise, token_scales
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
# A logit is a sum of 64 products of 128 of given numbers; tensor cores add products of fp8 up with 14 bits.
LOGITS_TOLERANCE = 1e-3
# Of e4m3 codes: an element may be a step off where what is rounded is another by a bit.
CODES_ROUNDING = 32.0

DECODES = ((1, 65_536), (64, 8_192), (64, 65_536))
PROMPTS = ((0, 2_048), (14_336, 2_048), (63_488, 2_048))
HEADS = (128, 16)
LAYERS = 16
# Values of the setting index_key_dtype.
KEYS_ARE_FP8 = (False, True)
# Nothing is measured that bounds products of fp8.
FP8 = Ceiling("", "TFLOP/s")
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


class Index(NamedTuple):
    """An indexer's queries, their heads' weights and pages of keys; fp8 ones have scales."""

    q: torch.Tensor
    weights: torch.Tensor
    pages: torch.Tensor
    scales: torch.Tensor | None

    def logits(
        self, case: Case, some: torch.Tensor | None = None, backend: Backend = Backend.AUTO, **more: Any
    ) -> torch.Tensor:
        """Of all rows, or of some."""
        rows = (self.q, self.weights) if some is None else (self.q[some], self.weights[some])
        seen = case.rows if some is None else case.at(some)
        more = {"scales": self.scales, "backend": backend, **more}
        return index_logits(*rows, self.pages, case.tables, seen, case.length, **more)


def index_of(case: Case, fp8: bool) -> Index:
    q, pages = random(case.num_tokens, INDEX_HEADS, INDEX_DIM), case.pages(INDEX_DIM)
    weights = random(case.num_tokens, INDEX_HEADS, dtype=torch.float32)
    if not fp8:
        return Index(q, weights, pages, None)
    of_queries, of_keys = token_scales(q), token_scales(pages)
    codes = (quantise(rows, scales.unsqueeze(-1)) for rows, scales in ((q, of_queries), (pages, of_keys)))
    return Index(next(codes), weights * of_queries, next(codes), of_keys)


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


def logits(fp8: bool, make: partial[Case]) -> list[Measurement]:
    """TFLOP/s of the products."""
    case = make()
    index = index_of(case, fp8)
    out = torch.full((case.num_tokens, case.length), float("nan"), device=DEVICE)
    call = partial(index.logits, case, out=out)

    def error() -> float:
        call()
        rows, blank = case.some(), torch.zeros(case.length, device=DEVICE)
        wanted = index.logits(case, rows, Backend.REFERENCE)
        seen = torch.arange(case.length, device=DEVICE) < case.rows.num_keys[rows].unsqueeze(1)
        return row_error(torch.where(seen, out[rows], blank), torch.where(seen, wanted, blank))

    amount = 2e-12 * int(case.rows.num_keys.sum()) * INDEX_HEADS * INDEX_DIM
    ceiling = FP8 if fp8 else GEMM
    return [Measurement("index_logits", named(case.name, fp8), amount, call, error, LOGITS_TOLERANCE, ceiling=ceiling)]


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


def layer(heads: int, fp8: bool, make: partial[Case]) -> list[Measurement]:
    """Thousands of tokens per second through logits, choice and attention; the peer is dense attention over everything.

    Where all are chosen both give the same; elsewhere the sparse one is held against its parts' references above.
    """
    case = make()
    index = index_of(case, fp8)
    q, pages = random(case.num_tokens, heads, NOPE + ROPE), case.pages(WIDTH)
    kv_b = random(heads * (NOPE + VALUE), LATENT) * LATENT**-0.5
    dense = dense_layer(case, q, pages, kv_b)

    def call(k: int = TOP_K) -> torch.Tensor:
        made = index.logits(case, least_keys=k)
        return mla_sparse(q, pages, kv_b, case.tables, case.rows, top_k(made, case.rows.num_keys, k))

    amount = 1e-3 * case.num_tokens

    def error() -> float:
        return row_error(call(case.length), dense())

    name, peers = named(f"{heads} heads {case.name}", fp8), (Peer("dense", dense, amount),)
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


def named(case: str, fp8: bool) -> str:
    """Returns the case's name with its setting."""
    return f"{case}, index_key_dtype fp8_e4m3" if fp8 else case


def append(fp8: bool, tokens: int) -> list[Measurement]:
    """Returns GB/s over the bytes read and written; of queries that do not become fp8 only what is rotated counts."""
    q, k = random(tokens, INDEX_HEADS, INDEX_DIM), random(tokens, INDEX_DIM)
    weights = random(tokens, INDEX_HEADS, dtype=torch.float32)
    norm, bias = random(INDEX_DIM), random(INDEX_DIM)
    pages, slots = random(-(-tokens // PAGE), PAGE, INDEX_DIM), torch.randperm(tokens, device=DEVICE)
    pages, scales = (pages.to(E4M3), random(*pages.shape[:2], dtype=torch.float32)) if fp8 else (pages, None)
    positions = torch.randint(0, MAX_POSITIONS, (tokens,), device=DEVICE)
    angles = torch.rand(MAX_POSITIONS, INDEX_ROPE // 2, device=DEVICE) * 6
    table = torch.stack((angles.cos(), angles.sin()), dim=1)
    options = {"norm": norm, "bias": bias, "eps": EPS, "scales": scales}

    def error() -> float:
        made = []
        for backend in (Backend.AUTO, Backend.REFERENCE):
            filled = torch.zeros_like(pages)
            given = (q.clone(), weights, k, positions, table, filled, slots)
            queries = rotate_append_index(*given, **options, backend=backend)
            made.append((queries.q, filled))
        return max(difference(*pair) for pair in zip(*made, strict=True))

    call = partial(rotate_append_index, q, weights, k, positions, table, pages, slots, **options)
    read_and_written = 3 * INDEX_DIM if fp8 else 4 * INDEX_ROPE
    amount = 1e-9 * tokens * (INDEX_HEADS * read_and_written + (3 if fp8 else 4) * INDEX_DIM)
    name = named(f"{tokens} x {INDEX_HEADS} heads", fp8)
    return [Measurement("rotate_append_index", name, amount, call, error, CODES_ROUNDING if fp8 else ROUNDING)]


CASES = (*(partial(decoding, *sizes) for sizes in DECODES), *(partial(prompt, *sizes) for sizes in PROMPTS))
AREAS: dict[str, tuple[Maker, ...]] = {
    "index_logits": tuple(partial(logits, fp8, case) for fp8 in KEYS_ARE_FP8 for case in CASES),
    "top_k": tuple(partial(choice, case) for case in CASES),
    "sparse_attention": tuple(partial(attention, heads, case) for heads in HEADS for case in CASES),
    "sparse_layer": tuple(
        partial(layer, heads, fp8, case) for heads in HEADS for fp8 in KEYS_ARE_FP8 for case in CASES
    ),
    # Those of 64 sequences would fill the memory.
    "sparse_in_model": tuple(
        partial(in_a_model, partial(layer, 128, fp8, case), LAYERS)
        for fp8 in KEYS_ARE_FP8
        for case in (partial(decoding, *DECODES[0]), partial(prompt, *PROMPTS[-1]))
    ),
    "sparse_rows": tuple(partial(append, fp8, tokens) for fp8 in KEYS_ARE_FP8 for tokens in NEW_TOKENS),
}
