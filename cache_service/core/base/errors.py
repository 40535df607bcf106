"""What a caller did wrong, as a tree; what can merely happen (no room, a miss) is a value, never an error.

CacheError                    field, reason
├── InvalidInput              a field is malformed, out of range or inconsistent      INVALID_ARGUMENT
├── UnknownWorker             no such worker, or it is not connected                  NOT_FOUND
├── UnknownSequence           the lease does not exist (any more)                     INVALID_ARGUMENT
├── DuplicateSequence         the sequence id holds a lease already                   ALREADY_EXISTS
├── UnknownTicket             the ticket was never issued                             INVALID_ARGUMENT
├── Superseded                a newer incarnation or stream of the worker took over   ABORTED
├── LeasesInScope             clear would take pages that live sequences hold         FAILED_PRECONDITION
└── TooMany                   a configured limit is reached                           RESOURCE_EXHAUSTED
"""

from __future__ import annotations


class CacheError(Exception):
    """Base of all; `field` names the offending input, `reason` says what is wrong with it."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class InvalidInput(CacheError):
    pass


class UnknownWorker(CacheError):
    pass


class UnknownSequence(CacheError):
    pass


class DuplicateSequence(CacheError):
    pass


class UnknownTicket(CacheError):
    pass


class Superseded(CacheError):
    pass


class LeasesInScope(CacheError):
    pass


class TooMany(CacheError):
    pass
