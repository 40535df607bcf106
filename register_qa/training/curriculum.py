"""How long the sequences are at which time, and how fast is learnt: short registers first, long ones at the end.

What finds a fact forms over short registers and hardly at all over long ones, where each answer is in one of a hundred
lines; once it is there, it only has to be stretched.
"""

from __future__ import annotations

from typing import NamedTuple

WARM_UP_STEPS = 100
# The rate stays at its height until the last part of a run, then falls in a straight line.
FALLING_SHARE = 0.35
LAST_RATE_SHARE = 0.01


class Stage(NamedTuple):
    """Batches of one kind, until the model has learnt them.

    `length` is the tokens of a sequence, `sequences` those of a batch, `recited` the share of recited lines in what
    follows a register, and `pass_mark` the accuracy on held-out registers, mean of all kinds, that ends the stage.
    `guidance` is the weight of the losses that ask inside the model.

    To recite is to write a line again, given its subject. It takes what answers take, finding a line by its subject,
    and every word of it teaches, where an answer has one or two words that must be found.
    """

    length: int
    sequences: int
    recited: float = 0.0
    pass_mark: float = 2.0
    guidance: float = 0.0


# The last stage of each goes on to the last step: no accuracy passes it.
CURRICULA: dict[str, tuple[Stage, ...]] = {
    # From nothing to registers of 3,500 tokens.
    "full": (
        Stage(160, 96, recited=0.5, pass_mark=0.85, guidance=0.5),
        Stage(320, 64, recited=0.5, pass_mark=0.85, guidance=0.5),
        Stage(640, 40, recited=0.3, pass_mark=0.85, guidance=0.5),
        Stage(1280, 24, recited=0.2, pass_mark=0.85, guidance=0.3),
        Stage(2560, 16, recited=0.1, pass_mark=0.85, guidance=0.2),
        Stage(4096, 16, recited=0.1, pass_mark=0.95, guidance=0.1),
        Stage(4096, 16),
    ),
    # For a model that can do long ones already, to do them better.
    "long": (Stage(4096, 16),),
    # To watch accuracy rise on a CPU.
    "short": (Stage(160, 16, recited=0.5, guidance=0.5),),
}


def rate_share(step: int, done: float) -> float:
    """Of the highest learning rate; `done` is the share of the run that is over, 0 to 1."""
    rising = (step + 1) / WARM_UP_STEPS
    falling = (1.0 - done) / FALLING_SHARE
    return max(LAST_RATE_SHARE, min(1.0, rising, falling))
