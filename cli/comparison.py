"""Whether two greedy answers to the same prompt are the same.

Token for token, but for one case: 16-bit models compute a token alone (decode) and among others (prefill) with other
roundings, unless their worker runs with invariance `strict`. A later turn that reads what decode wrote may then part
from a cold run where that run itself rated two tokens as good as equal.
"""

from __future__ import annotations

from array import array
from enum import Enum

from cli.client import Answer

# In nats. The step between neighbouring bf16 numbers is 0.125 where logits are between 16 and 32.
TIE = 0.2
# How many of the best tokens a cold run has to name.
NUM_RATED = 4


class Likeness(Enum):
    SAME = "same"
    TIE = "tie"
    OTHER = "other"


def compare(warm: Answer, cold: Answer) -> Likeness:
    """`cold` was asked for the log-probabilities of its best tokens; without them there are no ties."""
    if warm.token_ids == cold.token_ids:
        return Likeness.SAME
    at = next((i for i, (a, b) in enumerate(zip(warm.token_ids, cold.token_ids, strict=False)) if a != b), None)
    if at is None or at >= len(cold.logprobs):
        return Likeness.OTHER
    rated = cold.logprobs[at]
    by_token = dict(zip(array("i", rated.top_ids), rated.top_logprobs, strict=True))
    other = by_token.get(warm.token_ids[at])
    return Likeness.TIE if other is not None and rated.logprob - other <= TIE else Likeness.OTHER
