"""How a step's extends are computed: runs of neighbouring sequences on one path, and the chunks of a materialised run.

Reads nothing back from the device, and uploads once.

    sequence 0   |==== chunk 0 ====|==== chunk 1 ====|= 2 =|        chunks end at multiples of BLOCK of a sequence's own
    sequence 1   |=== 0 ===|                                        positions, where a softmax can be carried on bit by
    sequence 2   |==== chunk 0 ====|= 1 =|                          bit; a short one owns nothing in the later ones
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import torch

from kernels._checks import check_block_tables
from kernels.errors import KernelArgumentError
from kernels.latent_dims import LatentDims
from kernels.mla.rule import MlaPath, choose_path
from kernels.mla_decode import MlaDecodePlan
from kernels.mla_prefill import BLOCK, MlaPrefillPlan

__all__ = ["CHUNK_TOKENS", "AbsorbedRun", "Chunk", "ExtendPlan", "MaterialisedRun", "plan_extend", "workspace_bytes"]

CHUNK_TOKENS = 32768


@dataclass(frozen=True, slots=True)
class AbsorbedRun:
    """Sequences whose queries go to the latents."""

    first_token: int
    last_token: int
    block_tables: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seqlens_k: torch.Tensor
    max_q_tokens: int
    max_seqlen_k: int
    plan: MlaDecodePlan | None


@dataclass(frozen=True, slots=True)
class Chunk:
    """Latents from first_positions on, cu_seqlens_k of them; query 0 of a sequence is at q_offsets among them.

    Without the two: all latents, the last of which are the queries' own. num_latents bounds cu_seqlens_k's end.
    """

    first_positions: torch.Tensor | None
    cu_seqlens_k: torch.Tensor
    q_offsets: torch.Tensor | None
    num_latents: int
    plan: MlaPrefillPlan | None


@dataclass(frozen=True, slots=True)
class MaterialisedRun:
    """Sequences whose latents become keys and values."""

    first_token: int
    last_token: int
    block_tables: torch.Tensor
    cu_seqlens_q: torch.Tensor
    max_seqlen_q: int
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class ExtendPlan:
    """Valid for one step, shared by all its layers."""

    num_tokens: int
    heads: int
    runs: tuple[AbsorbedRun | MaterialisedRun, ...]


def plan_extend(
    block_tables: torch.Tensor,
    new_tokens: Sequence[int],
    cached_tokens: Sequence[int],
    heads: int,
    *,
    path: MlaPath = MlaPath.AUTO,
    chunk_tokens: int = CHUNK_TOKENS,
) -> ExtendPlan:
    """The plan for sequences whose lengths are these; block_tables int32 [num_seqs, any], on the device that computes.

    chunk_tokens bounds the latents that are projected at a time, one BLOCK per sequence at least; workspace_bytes says
    what memory they take. On a CPU fp32 sequences are computed one after the other, each at once.
    """
    num_seqs = len(new_tokens)
    check_block_tables(block_tables, num_seqs, block_tables.device)
    if len(cached_tokens) != num_seqs or min([0, *new_tokens, *cached_tokens]) < 0:
        raise KernelArgumentError(f"new_tokens, cached_tokens: got {list(new_tokens)} and {list(cached_tokens)}")
    if chunk_tokens < BLOCK:
        raise KernelArgumentError(f"chunk_tokens: must be at least {BLOCK}, got {chunk_tokens}")
    starts = [0, *accumulate(new_tokens)]
    runs: list[AbsorbedRun | MaterialisedRun] = []
    for chosen, members in groupby(range(num_seqs), lambda seq: choose_path(new_tokens[seq], path)):
        seqs = list(members)
        part = slice(seqs[0], seqs[-1] + 1)
        new, cached = list(new_tokens[part]), list(cached_tokens[part])
        span = (starts[part.start], starts[part.stop])
        if chosen is MlaPath.ABSORBED:
            runs.append(_absorbed(span, block_tables[part], new, cached, heads))
        else:
            runs.append(_materialised(span, block_tables[part], new, cached, chunk_tokens))
    return ExtendPlan(starts[-1], heads, tuple(runs))


def workspace_bytes(chunk_tokens: int, heads: int, dims: LatentDims, dtype: torch.dtype) -> int:
    """Bytes that a layer's extend holds for its latents while it attends to them: rows gathered, keys and values made.

    2.1 GB for CHUNK_TOKENS of DeepSeek-V3's 128 heads in 16 bits. Beyond one chunk there is an AttentionState too,
    heads * (value + 2) fp32 numbers for each new token.
    """
    if chunk_tokens < 0 or heads < 1:
        raise KernelArgumentError(f"chunk_tokens, heads: must be counts, got {chunk_tokens} and {heads}")
    return chunk_tokens * (dims.width + heads * (dims.nope + dims.value)) * dtype.itemsize


def _absorbed(
    span: tuple[int, int], tables: torch.Tensor, new: list[int], cached: list[int], heads: int
) -> AbsorbedRun:
    lengths = [c + n for c, n in zip(cached, new, strict=True)]
    cu_q, seqlens_k = _upload([[0, *accumulate(new)], lengths], tables.device)
    most = max(1, *new)
    plan = None
    if tables.is_cuda:
        plan = MlaDecodePlan(len(new), max(lengths), heads, max_q_tokens=most, device=tables.device)
        plan.prepare(seqlens_k, cu_q)
    return AbsorbedRun(*span, tables, cu_q, seqlens_k, most, max(lengths), plan)


def _materialised(
    span: tuple[int, int], tables: torch.Tensor, new: list[int], cached: list[int], chunk_tokens: int
) -> MaterialisedRun:
    bounds = list(_chunks([c + n for c, n in zip(cached, new, strict=True)], chunk_tokens))
    vectors = [[0, *accumulate(new)]]
    for first, counts in bounds:
        vectors += [[first] * len(new), [0, *accumulate(counts)], [c - first for c in cached]]
    cu_q, *rest = _upload(vectors, tables.device)
    chunks = []
    for index, (_, counts) in enumerate(bounds):
        firsts, cu_k, offsets = rest[3 * index : 3 * index + 3]
        plan = None
        if tables.is_cuda:
            plan = MlaPrefillPlan(len(new), sum(new), device=tables.device)
            plan.prepare(cu_q, cu_k, offsets)
        chunks.append(Chunk(firsts, cu_k, offsets, sum(counts), plan))
    return MaterialisedRun(*span, tables, cu_q, max(new), tuple(chunks))


def _chunks(lengths: list[int], chunk_tokens: int) -> Iterator[tuple[int, list[int]]]:
    """(first position, latents of each sequence) of every chunk: as wide as the sequences that still need it allow."""
    first = 0
    while first < max(lengths) or first == 0:
        owners = sum(length > first for length in lengths)
        width = max(chunk_tokens // max(owners, 1) // BLOCK, 1) * BLOCK
        yield first, [min(max(length - first, 0), width) for length in lengths]
        first += width


def _upload(vectors: list[list[int]], device: torch.device) -> list[torch.Tensor]:
    """int32 vectors on the device, by one copy that the host does not wait for.

    Each begins at a multiple of 16 bytes: where one begins must not mean another compilation.
    """
    packed: list[int] = []
    spans = []
    for vector in vectors:
        spans.append(slice(len(packed), len(packed) + len(vector)))
        packed += vector + [0] * (-len(vector) % 4)
    tensor = torch.tensor(packed, dtype=torch.int32)
    if device.type == "cuda":
        tensor = tensor.pin_memory().to(device, non_blocking=True)
    return [tensor[span] for span in spans]
