"""Which function a gate goes through before it is multiplied with its up."""

from enum import Enum
from typing import NamedTuple


class GateKind(Enum):
    """The activations of gated MLPs."""

    SILU = 0
    GELU_TANH = 1
    CLAMPED_SWIGLU = 2


class Gate(NamedTuple):
    """An activation; limit and alpha belong to CLAMPED_SWIGLU."""

    kind: GateKind
    limit: float = 0.0
    alpha: float = 1.0
