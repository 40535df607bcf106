"""What a model is made of: for each layer a mixer and an MLP, and what stands around them.

A family's reader makes a ModelSpec from config.json; the decoder, the pages and the plans are built from it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from kernels.route_experts import RoutingRule
from worker_service.model.attention_specs import AttentionSpec, CompressedSpec, LatentSpec, RopeConfig
from worker_service.model.recurrent_specs import Mamba2Spec, RecurrentSpec
from worker_service.model.weight_formats import UNQUANTISED, WeightFormat

PAGE_TOKENS = 16
# Of models with states: a snapshot then lies on the grid of the scans (ADR 17).
STATE_PAGE_TOKENS = 64


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

    @property
    def fits_shared(self) -> bool:
        """Returns whether the shared expert has the others' shape, so that one product can have all of them."""
        is_alike = self.shared == DenseSpec(self.intermediate_size, self.activation, self.bias)
        return is_alike and not (self.bias or self.latent_size or self.by_token)


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
