"""Latent attention's inputs and its truth: ragged lengths, permuted pages, poison in everything unused.

The truth is what the definition says, in fp64, one head at a time, with keys and values of every head.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kernels.latent_dims import LatentDims
from tests.kernels.inputs import POISON, running_sums

# What the kernels for Hopper are made for.
DEEPSEEK_V3 = LatentDims(latent=512, rope=64, nope=128, value=128)
LATENT, ROPE, NOPE, VALUE = DEEPSEEK_V3
WIDTH = LATENT + ROPE
SCALE = (NOPE + ROPE) ** -0.5
GLM_FLASH = LatentDims(latent=512, rope=64, nope=192, value=256)
# Of a model for tests, and of sizes that are no powers of two.
TINY, ODD = LatentDims(latent=32, rope=8, nope=16, value=24), LatentDims(latent=80, rope=20, nope=48, value=40)


@dataclass(frozen=True, slots=True)
class LatentCase:
    """Sequences of `cached` and then `new` tokens; their latents in pages and side by side."""

    lengths: tuple[tuple[int, int], ...]
    q: torch.Tensor
    latents: tuple[torch.Tensor, ...]
    pages: torch.Tensor
    block_tables: torch.Tensor
    kv_b: torch.Tensor
    dims: LatentDims = DEEPSEEK_V3

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    @property
    def new(self) -> list[int]:
        return [new for _, new in self.lengths]

    @property
    def cached(self) -> list[int]:
        return [cached for cached, _ in self.lengths]

    @property
    def totals(self) -> list[int]:
        return [cached + new for cached, new in self.lengths]

    @property
    def cu_q(self) -> torch.Tensor:
        return running_sums(self.new, str(self.q.device))

    @property
    def cu_k(self) -> torch.Tensor:
        return running_sums(self.totals, str(self.q.device))

    @property
    def seqlens_k(self) -> torch.Tensor:
        return self.cu_k.diff()

    def rows(self, seq: int) -> slice:
        """Where a sequence's queries lie."""
        first = sum(self.new[:seq])
        return slice(first, first + self.new[seq])


def make_latents(
    lengths: Sequence[tuple[int, int]],
    heads: int = 2,
    *,
    page_tokens: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    seed: int = 0,
    dims: LatentDims = DEEPSEEK_V3,
) -> LatentCase:
    """A batch of (cached, new) sequences whose latents are all in their pages."""
    rng = torch.Generator().manual_seed(seed)

    def random(*size: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(size, generator=rng) * scale).to(dtype).to(device)

    counts = [-(-(cached + new) // page_tokens) for cached, new in lengths]
    order = (torch.randperm(sum(counts) + 2, generator=rng) + 1).int()
    pages = torch.full((sum(counts) + 3, page_tokens, dims.width), POISON, dtype=dtype, device=device)
    tables, taken, latents = torch.zeros(len(lengths), max([*counts, 1]) + 1, dtype=torch.int32), 0, []
    for seq, ((cached, new), count) in enumerate(zip(lengths, counts, strict=True)):
        tables[seq, :count] = order[taken : taken + count]
        taken += count
        latents.append(random(cached + new, dims.width))
        position = torch.arange(cached + new)
        page, slot = tables[seq].long()[position // page_tokens], position % page_tokens
        pages[page.to(device), slot.to(device)] = latents[-1]
    return LatentCase(
        lengths=tuple(lengths),
        q=random(sum(new for _, new in lengths), heads, dims.head),
        latents=tuple(latents),
        pages=pages,
        block_tables=tables.to(device),
        kv_b=random(heads * (dims.nope + dims.value), dims.latent, scale=dims.latent**-0.5),
        dims=dims,
    )


def permuted(case: LatentCase, seed: int = 7) -> LatentCase:
    """The same batch with its pages elsewhere."""
    order = torch.randperm(case.pages.shape[0], generator=torch.Generator().manual_seed(seed))
    place = torch.empty_like(order)
    place[order] = torch.arange(order.shape[0])
    tables = place[case.block_tables.cpu().long()].int().to(case.q.device)
    pages = case.pages[order.to(case.q.device)].contiguous()
    return replace(case, pages=pages, block_tables=tables)


def attention_truth(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offset: int, scale: float = SCALE
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [new, heads, value] and lse [heads, new] in fp64 of q, k, v [tokens, heads, dim]; no key: 0, -inf."""
    outs, lses = [], []
    hidden = torch.arange(k.shape[0], device=q.device) > torch.arange(q.shape[0], device=q.device)[:, None] + offset
    for head in range(q.shape[1]):
        scores = (q[:, head].double() @ k[:, head].double().T * scale).masked_fill(hidden, float("-inf"))
        outs.append(torch.softmax(scores, dim=-1).nan_to_num(0.0) @ v[:, head].double())
        lses.append(torch.logsumexp(scores, dim=-1))
    return torch.stack(outs, dim=1), torch.stack(lses)


def projected(case: LatentCase) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """k_nope, k_rope and v of all sequences, as the model's dtype rounds them."""
    latents, (latent, _, nope, value) = torch.cat(case.latents), case.dims
    kv = (latents[:, :latent].double() @ case.kv_b.double().T).to(latents.dtype).view(-1, case.heads, nope + value)
    return kv[..., :nope], latents[:, latent:].contiguous(), kv[..., nope:]


def extend_truth(case: LatentCase) -> torch.Tensor:
    """What mla_extend must give, every head's keys and values written out."""
    outs, (latent, _, nope, value) = [], case.dims
    for seq, (cached, new) in enumerate(case.lengths):
        latents = case.latents[seq].double()
        kv = (latents[:, :latent] @ case.kv_b.double().T).view(cached + new, case.heads, nope + value)
        rope = latents[:, None, latent:].expand(-1, case.heads, -1)
        keys = torch.cat([kv[..., :nope], rope], dim=-1)
        outs.append(attention_truth(case.q[case.rows(seq)], keys, kv[..., nope:], cached, case.dims.head**-0.5)[0])
    return torch.cat(outs)
