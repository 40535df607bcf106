"""The tensors of a layer with a recurrence, as scans and updates take them, and what is refused of them."""

from typing import NamedTuple

import torch

from kernels._checks import (
    KV_DTYPES,
    check_dense,
    check_dense_pages,
    check_disjoint,
    check_head_rows,
    check_rows,
    check_tensor,
)
from kernels.block_scan.steps import Mamba2Steps, check_steps
from kernels.errors import KernelArgumentError

MAX_DIM = 256


class GatedDeltaLayer(NamedTuple):
    """The gated delta rule; `norm_eps` is None where queries and keys are used as they are.

    q, k      [num_tokens, k_heads, dk]
    v         [num_tokens, heads, dv]
    g         [num_tokens, heads], or [num_tokens, heads, dk]: a decay for each key channel
    beta      [num_tokens, heads]
    states    [num_slots, heads, dk, dv]
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    states: torch.Tensor
    scale: float
    norm_eps: float | None

    @property
    def by_channel(self) -> bool:
        """Returns whether each key channel has a decay of its own."""
        return self.g.dim() == 3


class Mamba2Layer(NamedTuple):
    """Mamba2's recurrence.

    x, gate   [num_tokens, heads, dim]
    b, c      [num_tokens, groups, d_state]
    states    [num_slots, heads, dim, d_state]
    skip      [heads]
    """

    x: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor
    steps: Mamba2Steps
    states: torch.Tensor
    skip: torch.Tensor | None
    gate: torch.Tensor | None


def check_gated_delta(layer: GatedDeltaLayer) -> None:
    """Refuses what no implementation can work with."""
    v, k, device = layer.v, layer.k, layer.v.device
    check_tensor("v", v, (None, None, None), KV_DTYPES, device)
    tokens, heads, dim = v.shape
    check_tensor("k", k, (tokens, None, None), (v.dtype,), device)
    k_heads, k_dim = k.shape[1:]
    _check_heads("k", "heads", k_heads, heads, (k_dim, dim))
    check_tensor("q", layer.q, (tokens, k_heads, k_dim), (v.dtype,), device)
    for name, rows in (("q", layer.q), ("k", k), ("v", v)):
        check_head_rows(name, rows)
        check_disjoint("states", layer.states, name, rows)
    check_tensor("beta", layer.beta, (tokens, heads), KV_DTYPES, device)
    check_rows("beta", layer.beta)
    if layer.by_channel:
        check_tensor("g", layer.g, (tokens, heads, k_dim), KV_DTYPES, device)
        check_head_rows("g", layer.g)
    else:
        check_tensor("g", layer.g, (tokens, heads), KV_DTYPES, device)
        check_rows("g", layer.g)
    _check_states(layer.states, (heads, k_dim, dim), device)


def check_mamba2(layer: Mamba2Layer) -> None:
    """Refuses what no implementation can work with."""
    x, b, device = layer.x, layer.b, layer.x.device
    check_tensor("x", x, (None, None, None), KV_DTYPES, device)
    tokens, heads, dim = x.shape
    check_tensor("b", b, (tokens, None, None), (x.dtype,), device)
    groups, d_state = b.shape[1:]
    _check_heads("b", "groups", groups, heads, (d_state, dim))
    check_tensor("c", layer.c, (tokens, groups, d_state), (x.dtype,), device)
    if layer.gate is not None:
        check_tensor("gate", layer.gate, (tokens, heads, dim), (x.dtype,), device)
    for name, rows in (("x", x), ("b", b), ("c", layer.c), ("gate", layer.gate)):
        if rows is not None:
            check_head_rows(name, rows)
            check_disjoint("states", layer.states, name, rows)
    check_steps(layer.steps, tokens, heads, device)
    if layer.skip is not None:
        check_dense("skip", layer.skip, (heads,), (torch.float32,), device)
    _check_states(layer.states, (heads, dim, d_state), device)


def _check_heads(name: str, what: str, count: int, heads: int, dims: tuple[int, int]) -> None:
    if not 1 <= count <= heads or heads % count:
        raise KernelArgumentError(f"{name}: its {what} must divide {heads} heads, got {count}")
    if not (min(dims) >= 1 and max(dims) <= MAX_DIM):
        raise KernelArgumentError(f"{name}: heads must have 1 to {MAX_DIM} elements, states are of {list(dims)}")


def _check_states(states: torch.Tensor, shape: tuple[int, int, int], device: torch.device) -> None:
    check_tensor("states", states, (None, *shape), (torch.float32,), device)
    check_dense_pages("states", states)
