"""Which gRPC status stands for which of our errors: the one table.

rpc.errors applies it.
"""

from __future__ import annotations

from grpc import StatusCode

from cache_service import watchers, worker_streams
from cache_service.core.base import errors
from session.errors import Damaged, InvalidInput, TooMany

CODES: dict[type[Exception], StatusCode] = {
    InvalidInput: StatusCode.INVALID_ARGUMENT,
    errors.UnknownWorker: StatusCode.NOT_FOUND,
    errors.UnknownAttachment: StatusCode.NOT_FOUND,
    errors.UnknownSequence: StatusCode.INVALID_ARGUMENT,
    errors.DuplicateSequence: StatusCode.ALREADY_EXISTS,
    errors.UnknownTicket: StatusCode.INVALID_ARGUMENT,
    errors.Superseded: StatusCode.ABORTED,
    errors.Detached: StatusCode.ABORTED,
    errors.LeasesInScope: StatusCode.FAILED_PRECONDITION,
    TooMany: StatusCode.RESOURCE_EXHAUSTED,
    watchers.WatcherTooSlow: StatusCode.RESOURCE_EXHAUSTED,
    watchers.WatchIsOff: StatusCode.FAILED_PRECONDITION,
    Damaged: StatusCode.DATA_LOSS,
    worker_streams.PeerTooSlow: StatusCode.DEADLINE_EXCEEDED,
    worker_streams.ShuttingDown: StatusCode.UNAVAILABLE,
}
