"""The recurrences of states in fp64, written down from their definitions, and what a launch of many rows must give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from kernels.block_scan import Mamba2Steps
from kernels.state_slots import StateSlots
from tests.kernels.state_inputs import Begin, StateRow, sources

# A token's outputs from its number and the state before it, which is changed: fp64.
Step = Callable[[int, torch.Tensor], torch.Tensor]


def gated_delta(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
    scale: float, norm_eps: float | None,
) -> Step:  # fmt: skip
    """State [heads, dk, dv]; g [num_tokens, heads] or [num_tokens, heads, dk]."""
    q, k, v, g, beta = (given.double() for given in (q, k, v, g, beta))
    if norm_eps is not None:
        q, k = (rows / (rows.square().sum(-1, keepdim=True) + norm_eps).sqrt() for rows in (q, k))
    group = v.shape[1] // k.shape[1]

    def step(token: int, state: torch.Tensor) -> torch.Tensor:
        query, key = (rows[token].repeat_interleave(group, 0) for rows in (q, k))
        state *= g[token].exp().view(v.shape[1], -1, 1)
        error = v[token] - torch.einsum("hk,hkv->hv", key, state)
        state += torch.einsum("hk,hv->hkv", key, error * beta[token, :, None])
        return torch.einsum("hk,hkv->hv", query, state) * scale

    return step


def mamba2(
    x: torch.Tensor, b: torch.Tensor, c: torch.Tensor, steps: Mamba2Steps,
    skip: torch.Tensor | None, gate: torch.Tensor | None,
) -> Step:  # fmt: skip
    """State [heads, dim, d_state]."""
    x, b, c, raw = (given.double() for given in (x, b, c, steps.raw))
    if steps.bias is not None:
        raw = raw + steps.bias.double()
    sizes = torch.nn.functional.softplus(raw).clamp(steps.least, steps.most)
    group = x.shape[1] // b.shape[1]

    def step(token: int, state: torch.Tensor) -> torch.Tensor:
        write, read = (rows[token].repeat_interleave(group, 0) for rows in (b, c))
        state *= (sizes[token] * steps.a.double()).exp()[:, None, None]
        state += torch.einsum("hd,hn->hdn", x[token] * sizes[token, :, None], write)
        out = torch.einsum("hdn,hn->hd", state, read)
        if skip is not None:
            out = out + skip.double()[:, None] * x[token]
        return out if gate is None else out * torch.nn.functional.silu(gate[token].double())

    return step


def expected(
    step: Step, slots: StateSlots, rows: Sequence[StateRow], cu_seqlens_q: torch.Tensor, pool: torch.Tensor,
    shape: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns outputs [num_tokens, *shape] in fp64, zeros for padding rows, and the pool afterwards, in fp64."""
    out = torch.zeros((int(cu_seqlens_q[-1]), *shape), dtype=torch.float64)
    after = pool.double()
    spans = pairwise(cu_seqlens_q.tolist())
    for index, (row, source, (begin, end)) in enumerate(zip(rows, sources(slots, rows), spans, strict=True)):
        if row.begin is Begin.PADDING:
            continue
        state = pool[source].double() if source else torch.zeros_like(after[0])
        left = {
            int(tokens): int(slot) for at, tokens, slot in zip(*slots[-3:], strict=True) if at == index and slot > 0
        }
        for token in range(begin, end):
            out[token] = step(token, state)
            if token + 1 - begin in left:
                after[left[token + 1 - begin]] = state
        for slot in (slots.working[index], slots.rolling[index]):
            if slot > 0:
                after[slot] = state
    return out, after


def assert_states(got: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    """Slots that nobody writes are NaN in both; the others are near, for the size of the largest state."""
    assert torch.equal(got.isnan(), wanted.isnan())
    worst = (got.double() - wanted).nan_to_num().abs().max().item()
    assert worst <= tolerance * max(1.0, wanted.nan_to_num().abs().max().item()), f"largest error {worst}"
