"""How long the sequences are at which step, and how fast is learnt: short registers first, long ones at the end.

Knows no data and no model. What finds a fact forms soon over short registers and hardly at all over long ones, where
each answer is in one of a hundred lines; once it is there, it only has to be stretched.
"""

from __future__ import annotations

import math
from typing import NamedTuple

WARM_UP_STEPS = 200
LAST_RATE_SHARE = 0.02


class Stage(NamedTuple):
    """Tokens of a sequence, and sequences of a batch."""

    length: int
    sequences: int


class Part(NamedTuple):
    share: float
    stage: Stage


CURRICULA: dict[str, tuple[Part, ...]] = {
    # From nothing to registers of 3,500 tokens.
    "full": (
        Part(0.20, Stage(320, 96)),
        Part(0.20, Stage(640, 48)),
        Part(0.20, Stage(1280, 32)),
        Part(0.20, Stage(2560, 16)),
        Part(0.20, Stage(4096, 16)),
    ),
    # For a model that can do short ones already.
    "long": (
        Part(0.15, Stage(1024, 32)),
        Part(0.25, Stage(2048, 24)),
        Part(0.60, Stage(4096, 16)),
    ),
    # To watch accuracy rise on a CPU.
    "short": (Part(1.0, Stage(320, 8)),),
}


def stages_of(curriculum: str, steps: int) -> list[Stage]:
    """One for each step."""
    stages: list[Stage] = []
    done = 0.0
    for part in CURRICULA[curriculum]:
        done += part.share
        stages += [part.stage] * (round(done * steps) - len(stages))
    return stages


def rate_share(step: int, steps: int) -> float:
    """Of the highest learning rate: a linear rise, then half a cosine down."""
    if step < WARM_UP_STEPS:
        return (step + 1) / WARM_UP_STEPS
    progress = (step - WARM_UP_STEPS) / max(1, steps - WARM_UP_STEPS)
    return LAST_RATE_SHARE + (1 - LAST_RATE_SHARE) * 0.5 * (1 + math.cos(math.pi * progress))
