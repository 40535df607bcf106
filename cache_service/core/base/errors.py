"""What a caller did wrong, as a tree; what can merely happen (no room, a miss) is a value, never an error.

FieldError (session.errors)   field, reason
├── InvalidInput              see there                                               INVALID_ARGUMENT
├── TooMany                   see there                                               RESOURCE_EXHAUSTED
├── UnknownWorker             no such worker, or it is not connected                  NOT_FOUND
├── UnknownAttachment         no such engine is attached now                          NOT_FOUND
├── UnknownSequence           the lease does not exist (any more)                     INVALID_ARGUMENT
├── DuplicateSequence         the sequence id holds a lease already                   ALREADY_EXISTS
├── UnknownTicket             the ticket was never issued                             INVALID_ARGUMENT
├── Superseded                a newer incarnation or stream of the worker took over   ABORTED
├── Detached                  the attachment has ended, or is of a former epoch          ABORTED
└── LeasesInScope             clear would take pages that live sequences hold         FAILED_PRECONDITION
"""

from __future__ import annotations

from session.errors import FieldError


class UnknownWorker(FieldError):
    pass


class UnknownAttachment(FieldError):
    pass


class UnknownSequence(FieldError):
    pass


class DuplicateSequence(FieldError):
    pass


class UnknownTicket(FieldError):
    pass


class Superseded(FieldError):
    pass


class Detached(FieldError):
    pass


class LeasesInScope(FieldError):
    pass
