"""Which function a gate goes through before it is multiplied with its up."""

import math
from enum import Enum
from typing import NamedTuple


class GateKind(Enum):
    """The activations of gated MLPs."""

    SILU = 0
    GELU_TANH = 1
    CLAMPED_SWIGLU = 2


class Gate(NamedTuple):
    """An activation of gates cut at `limit`, times ups cut at both `limit` and -limit; alpha belongs to
    CLAMPED_SWIGLU."""

    kind: GateKind
    limit: float = math.inf
    alpha: float = 1.0

    @property
    def clamps(self) -> bool:
        return self.limit < math.inf
