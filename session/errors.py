"""What is wrong with a field that a peer sent or a caller gave.

FieldError                    field, reason
├── InvalidInput              a field is malformed, out of range or inconsistent      INVALID_ARGUMENT
├── TooMany                   a configured limit is reached                           RESOURCE_EXHAUSTED
└── Damaged                   a message failed its checksum                           DATA_LOSS
"""

from __future__ import annotations


class FieldError(Exception):
    """Base of all; `field` names the offending input, `reason` says what is wrong with it."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class InvalidInput(FieldError):
    pass


class TooMany(FieldError):
    pass


class Damaged(FieldError):
    pass
