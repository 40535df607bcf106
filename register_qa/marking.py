"""Says whether a generated text is the right answer to a question: it must match word for word."""

from __future__ import annotations

from register_qa.questions import Question


def is_correct(question: Question, text: str) -> bool:
    """`text` is what was generated behind the question, special tokens left out; white space around it is forgiven."""
    return text.strip() == question.answer
