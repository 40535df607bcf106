"""The small real models in the box, and their task: questions about a register, nothing but reading the prefix.

A register is a text, a question is a suffix, and a model is a folder: one with attention in every layer, and a hybrid
with two layers of recurrent states for each of attention.
"""

from pathlib import Path

from register_qa.facts import Attribute, Fact, Split, split_of
from register_qa.questions import ONE_FACT_KINDS, AskedFact, Kind, Question, draw_questions, is_correct
from register_qa.register import (
    MAX_HOLDINGS,
    MIN_HOLDINGS,
    Holding,
    Place,
    Register,
    RoomKey,
    Span,
    draw_register,
)

MODEL_FOLDER = Path(__file__).parent / "model"
HYBRID_FOLDER = Path(__file__).parent / "hybrid_model"

__all__ = [
    "HYBRID_FOLDER",
    "MAX_HOLDINGS",
    "MIN_HOLDINGS",
    "MODEL_FOLDER",
    "ONE_FACT_KINDS",
    "AskedFact",
    "Attribute",
    "Fact",
    "Holding",
    "Kind",
    "Place",
    "Question",
    "Register",
    "RoomKey",
    "Span",
    "Split",
    "draw_questions",
    "draw_register",
    "is_correct",
    "split_of",
]
