"""Layers with a recurrent state, as a family's reader describes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class StateArray(NamedTuple):
    """Part of what a layer keeps of a sequence: an array in fp32 where `wide` says so, else in the model's dtype."""

    shape: tuple[int, ...]
    wide: bool = False


@dataclass(frozen=True, slots=True)
class ShortConvSpec:
    """A gated convolution over each channel's last tokens; as many channels as the hidden state has elements.

    width   taps of the convolution, the token itself among them; its state are the width - 1 columns before a token
    """

    width: int
    bias: bool = False

    def state(self, hidden_size: int) -> tuple[StateArray, ...]:
        return (StateArray((self.width - 1, hidden_size)),)


@dataclass(frozen=True, slots=True)
class Mamba2Spec:
    """Mamba2: a convolution over the last tokens, and behind it a recurrence with a state [head_dim, d_state] a head.

    num_groups       heads share the b and c of their group
    width            taps of the convolution, the token itself among them
    least_step       the size of a token's step is held within these two
    most_step
    norm             whether the output is normed, in `norm_groups` equal parts of its elements, each on its own
    norm_first       the gate is applied behind the norm, not before it
    scales           factors of what the first projection makes: gates, x, b, c and the raw steps
    """

    num_heads: int
    head_dim: int
    num_groups: int
    d_state: int
    width: int
    conv_bias: bool = True
    inner_bias: bool = False
    output_bias: bool = False
    least_step: float = 0.0
    most_step: float = float("inf")
    norm: bool = True
    norm_groups: int = 1
    norm_first: bool = False
    scales: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)

    @property
    def inner_size(self) -> int:
        """Elements of all heads."""
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """Of the convolution: x of all heads, b and c of all groups."""
        return self.inner_size + 2 * self.num_groups * self.d_state

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """Elements of gates, x, b, c and the raw steps."""
        group_size = self.num_groups * self.d_state
        return self.inner_size, self.inner_size, group_size, group_size, self.num_heads

    def state(self, hidden_size: int) -> tuple[StateArray, ...]:
        """The convolution's columns, and the sums of the recurrence: rounded, these would not go on as the uncut run
        does."""
        columns = StateArray((self.width - 1, self.channels))
        return columns, StateArray((self.num_heads, self.head_dim, self.d_state), wide=True)


@dataclass(frozen=True, slots=True)
class GatedDeltaSpec:
    """The gated delta rule, with a state [key_dim, value_dim] a head, behind a convolution of all that goes into it.

    num_k_heads   of queries and of keys; num_heads are those of values, of which consecutive ones share one of keys
    width         taps of the convolution, the token itself among them
    """

    num_heads: int
    num_k_heads: int
    key_dim: int
    value_dim: int
    width: int

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values of all heads."""
        return 2 * self.num_k_heads * self.key_dim + self.num_heads * self.value_dim

    def state(self, hidden_size: int) -> tuple[StateArray, ...]:
        """As of Mamba2."""
        columns = StateArray((self.width - 1, self.channels))
        return columns, StateArray((self.num_heads, self.key_dim, self.value_dim), wide=True)


@dataclass(frozen=True, slots=True)
class KimiDeltaSpec:
    """Kimi Delta Attention: the gated delta rule with a decay for each key channel, behind a convolution of queries,
    keys and values.

    head_dim   elements of a query, a key and a value
    rank       of the two projections, each of two factors, that make decays and the output's gates
    width      taps of the convolution, the token itself among them
    """

    num_heads: int
    head_dim: int
    rank: int
    width: int

    @property
    def inner_size(self) -> int:
        """Elements of all heads."""
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values of all heads."""
        return 3 * self.inner_size

    def state(self, hidden_size: int) -> tuple[StateArray, ...]:
        """As of Mamba2."""
        columns = StateArray((self.width - 1, self.channels))
        return columns, StateArray((self.num_heads, self.head_dim, self.head_dim), wide=True)


RecurrentSpec = ShortConvSpec | Mamba2Spec | GatedDeltaSpec | KimiDeltaSpec
