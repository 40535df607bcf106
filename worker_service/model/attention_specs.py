"""Layers with attention, as a family's reader describes them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class RopeKind(Enum):
    DEFAULT = "default"
    LINEAR = "linear"
    DYNAMIC = "dynamic"
    LLAMA3 = "llama3"
    YARN = "yarn"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    kind: RopeKind
    theta: float
    factor: float = 1.0
    original_max_tokens: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Attention over the keys and values of each head.

    rope            None: the layer does not see positions
    rotary_dim      how many elements of a head, from the first on, are turned
    interleaved     element 2 i is turned with 2 i + 1, not i with i + rotary_dim / 2
    window_tokens   how many tokens a query sees, itself among them; 0: all
    value_dim       elements of a value, at most head_dim; 0: head_dim. In pages a value is as long as a key
    value_scale     factor of the values
    scale           of the scores; None: 1 / sqrt(head_dim)
    softcap         c turns a score s into c tanh(s / c); 0: off
    output_gate     the output goes through a gate before its projection: the sigmoid of one more row for each query
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig | None
    rotary_dim: int
    window_tokens: int = 0
    value_dim: int = 0
    value_scale: float = 1.0
    scale: float | None = None
    softcap: float = 0.0
    interleaved: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    has_sinks: bool = False
    output_gate: bool = False


@dataclass(frozen=True, slots=True)
class IndexSpec:
    """Which tokens a query of a layer attends to: the `top_k` that an indexer wants most, all if there are no more.

    num_heads     of the indexer's queries; its keys are one row of head_dim elements a token
    interleaved   as in AttentionSpec, of the rotary part, which comes first
    is_shared     the layer takes the choice of the last layer before it that has an indexer, and has none itself
    """

    top_k: int
    num_heads: int
    head_dim: int
    interleaved: bool = False
    is_shared: bool = False
    norm_eps: float = 1e-6


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Attention over latents: one row a token, from which every head's keys and values are made.

    q_rank          queries come from a row of this length; 0: from the hidden state
    latent_dim      what a token's row holds beside the rotary key of all heads, which has rope_dim elements
    nope_dim        elements of a query, and of a key, that do not turn; the rope_dim turned ones follow them
    rope            None: these do not turn either, and are still one key for all heads
    inner_eps       of the norms of the query's and the token's row
    index           sparse attention: what chooses the tokens that a query attends to; None: all of them
    """

    num_heads: int
    q_rank: int
    latent_dim: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    rope: RopeConfig | None
    scale: float
    interleaved: bool = True
    bias: bool = False
    inner_eps: float = 1e-6
    index: IndexSpec | None = None

    @property
    def width(self) -> int:
        """Elements of a token's row in a page."""
        return self.latent_dim + self.rope_dim

    @property
    def query_dim(self) -> int:
        return self.nope_dim + self.rope_dim


@dataclass(frozen=True, slots=True)
class CompressorSpec:
    """What makes one entry of each `ratio` tokens of a sequence, a block.

    overlaps   an entry is made of its block and the one before
    index      which entries a query attends to, by keys that are made in the same way; None: all that it sees
    """

    ratio: int
    overlaps: bool
    index: IndexSpec | None = None

    @property
    def parts(self) -> int:
        """Vectors of an entry's length that a token gives: its value and gate, and those for the next block's entry."""
        return 4 if self.overlaps else 2

    @property
    def raw_tokens(self) -> int:
        """Tokens, the last one of a block among them, that its entry is made of; without overlap its page has all."""
        return 2 * self.ratio if self.overlaps else 1


@dataclass(frozen=True, slots=True)
class CompressedSpec:
    """Attention over a window of tokens and, beyond it, over compressed entries; a row is both key and value.

    rope_dim        elements of a head that turn, its last ones, neighbours together
    q_rank          queries come from a row of this length
    output_groups   groups of heads, each with a projection to output_rank elements before the one that all share
    eps             of the norms of queries, rows and entries
    """

    num_heads: int
    head_dim: int
    rope_dim: int
    q_rank: int
    window_tokens: int
    output_groups: int
    output_rank: int
    rope: RopeConfig
    eps: float
    compressor: CompressorSpec | None = None
