"""What the unanswered step asks for, for each sequence that it asks something for; the reply is applied to these."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from worker_service.core.sequence import Sequence


class Ask(Enum):
    ACQUIRE = "acquire"
    ADOPT = "adopt"
    EXTEND = "extend"
    REPLAN = "replan"


class Asked(NamedTuple):
    """`length` is the number of tokens that the sequence has pages for once this is granted.

    Usable tokens of an acquire or a replan come on top. `is_ahead`: an extend that asks for more than the next launch
    needs.
    """

    sequence: Sequence
    ask: Ask
    length: int
    is_ahead: bool = False
