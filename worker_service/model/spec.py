"""What a model is made of: for each layer a mixer and an MLP, and what stands around them.

A family's reader makes a ModelSpec from config.json; the decoder, the pages and the plans are built from it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from kernels.route_experts import RoutingRule
from worker_service.model.recurrent_specs import Mamba2Spec, RecurrentSpec
from worker_service.model.weight_formats import UNQUANTISED, WeightFormat

PAGE_TOKENS = 16
# Of models with states: a snapshot then lies on the grid of the scans (ADR 17).
STATE_PAGE_TOKENS = 64


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


@dataclass(frozen=True, slots=True)
class ParallelSpec:
    """Attention and a recurrence over the same input; each output is multiplied by its factor, then both are added."""

    attention: AttentionSpec
    recurrence: Mamba2Spec
    attention_scale: float = 1.0
    recurrence_scale: float = 1.0


LoneMixerSpec = AttentionSpec | LatentSpec | CompressedSpec | RecurrentSpec
MixerSpec = LoneMixerSpec | ParallelSpec


class Activation(Enum):
    """What makes the middle of an MLP from its gate and up halves. RELU2 squares what is positive, and has no gate."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    CLAMPED_SWIGLU = "clamped_swiglu"
    CLAMPED_SILU = "clamped_silu"
    RELU2 = "relu2"

    @property
    def is_gated(self) -> bool:
        return self is not Activation.RELU2


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """`gate_scale` is a factor of the gate, before the activation."""

    intermediate_size: int
    activation: Activation = Activation.SILU
    bias: bool = False
    gate_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """Experts, of which each token goes to the `rule.top_k` that the router chooses, and one that all tokens go to.

    selection_bias        the router adds a bias to the scores for the choice
    wide_router           the router computes in fp32
    shared                the expert of all tokens; None: there is none
    latent_size           of what goes into an expert and comes out of it, by two projections that all share; 0: the
                          hidden state's, and there are none
    shared_gate           its output is multiplied by the sigmoid of one more row of the router
    by_token              a table says which experts a token id goes to; the router says their weights
    """

    num_experts: int
    intermediate_size: int
    rule: RoutingRule
    activation: Activation = Activation.SILU
    bias: bool = False
    selection_bias: bool = False
    wide_router: bool = False
    shared: DenseSpec | None = None
    latent_size: int = 0
    shared_gate: bool = False
    by_token: bool = False


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """A mixer and an MLP, or one of them alone; what each adds to the residual stream is multiplied by its factor."""

    mixer: MixerSpec | None
    mlp: DenseSpec | MoeSpec | None
    mixer_scale: float = 1.0
    mlp_scale: float = 1.0

    @property
    def mixers(self) -> tuple[LoneMixerSpec, ...]:
        """None, one, or both that lie side by side."""
        if isinstance(self.mixer, ParallelSpec):
            return self.mixer.attention, self.mixer.recurrence
        return () if self.mixer is None else (self.mixer,)


class Block(Enum):
    """How a layer's parts are connected to the residual stream h.

    PRE_NORM    h += mixer(norm(h)); h += mlp(norm(h)), or one of both
    SANDWICH    h += norm(mixer(norm(h))); h += norm(mlp(norm(h)))
    PARALLEL    x = norm(h); h += mixer(x) + mlp(x)
    """

    PRE_NORM = "pre_norm"
    SANDWICH = "sandwich"
    PARALLEL = "parallel"


class NormKind(Enum):
    """RMS: by the root of the mean square. RMS_PLUS_ONE: the same, the stored weight counts from one. LAYER: by mean
    and variance, without a bias."""

    RMS = "rms"
    RMS_PLUS_ONE = "rms_plus_one"
    LAYER = "layer"


@dataclass(frozen=True, slots=True)
class NormSpec:
    eps: float
    kind: NormKind = NormKind.RMS


@dataclass(frozen=True, slots=True)
class StreamsSpec:
    """A residual of several streams, which each branch mixes anew (manifold-constrained hyper-connections).

    num_iters   times that the matrix between streams is normalised, by rows and by columns
    eps         what is added to its elements and to the sums that divide them
    """

    num_streams: int
    num_iters: int
    eps: float


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model as its config.json describes it.

    embedding_scale   factor of the embeddings, rounded to the model's dtype
    logits_scale      factor of the logits
    logits_softcap    c turns a logit s into c tanh(s / c); 0: off
    num_mtp_layers    layers behind the last one, for predicting further tokens: stored, and not computed
    page_tokens       token slots of a page, unless a setting has another number
    weight_format     how the folder's tensors are stored
    streams           of a residual of several; None: it is one
    """

    architecture: str
    dtype: str
    vocab_size: int
    hidden_size: int
    max_model_len: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    tied_embeddings: bool
    eos_token_ids: tuple[int, ...] = ()
    block: Block = Block.PRE_NORM
    embedding_scale: float = 1.0
    logits_scale: float = 1.0
    logits_softcap: float = 0.0
    num_mtp_layers: int = 0
    page_tokens: int = PAGE_TOKENS
    weight_format: WeightFormat = UNQUANTISED
    streams: StreamsSpec | None = None

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The distinct ones, in the order of the layers that use them first."""
        mixers = (mixer for layer in self.layers for mixer in layer.mixers)
        ropes = (mixer.rope for mixer in mixers if isinstance(mixer, AttentionSpec | LatentSpec | CompressedSpec))
        return tuple(dict.fromkeys(rope for rope in ropes if rope is not None))


def with_max_model_len(spec: ModelSpec, max_model_len: int) -> ModelSpec:
    """Returns the spec with that limit. A window as long as any sequence can be is none."""
    layers = tuple(replace(layer, mixer=_without_idle_window(layer.mixer, max_model_len)) for layer in spec.layers)
    return replace(spec, max_model_len=max_model_len, layers=layers)


def _without_idle_window(mixer: MixerSpec | None, max_model_len: int) -> MixerSpec | None:
    if isinstance(mixer, AttentionSpec) and mixer.window_tokens >= max_model_len:
        return replace(mixer, window_tokens=0)
    return mixer
