"""What goes wrong in a worker, as one tree; the right column is the status of a call that ends with it.

WorkerError
├── RequestError              one request is not served; the others go on
│   ├── InvalidField          a field of it (or a setting) cannot be served           INVALID_ARGUMENT
│   ├── Unservable            it fits into no pool of this worker                     INVALID_ARGUMENT
│   ├── QueueFull             as many requests wait as may                            RESOURCE_EXHAUSTED
│   ├── Draining              the worker takes no new requests                        UNAVAILABLE
│   ├── WorkerStopped         the worker has stopped; another one may serve it        UNAVAILABLE
│   └── RequestFailed         its forward pass failed                                 INTERNAL
├── StartError                the worker cannot start as it is set up
│   ├── ModelError            the model folder
│   └── PoolError             the pools
├── SessionError              the session with the cache service
│   ├── SessionLost           the stream broke; the engine connects again
│   │   ├── LostPlace         the cache service is at another step than this worker
│   │   └── StepRejected      the stream ended over one step or its reply
│   │       └── UnaskedReply  the reply is to something that was not asked
│   ├── SessionRefused        no cache service takes this worker; the process ends
│   └── StepsRejected         the cache service rejects this worker's steps; the process ends
└── DeviceLost                the device computes nothing any more; the process ends
"""

from __future__ import annotations

from session.errors import FieldError


class WorkerError(Exception):
    """Base of all."""


class RequestError(WorkerError):
    """One request is not served; the others go on."""


class InvalidField(RequestError, FieldError):
    """A request or a configuration cannot be served as given; `field` names the input, `reason` says what is wrong."""


class Unservable(RequestError):
    """The request can never run on this worker's pages, or the cache service takes no such request."""


class QueueFull(RequestError):
    """As many requests wait as are allowed to; this one was not taken."""


class Draining(RequestError):
    """The worker takes no new requests."""


class WorkerStopped(RequestError):
    """This worker serves nothing any more; another one may serve the request."""


class RequestFailed(RequestError):
    """The request's forward pass failed; others go on."""


class StartError(WorkerError):
    """The worker cannot start as it is set up; the text names the setting or the file."""


class ModelError(StartError, FieldError):
    """A model folder cannot be served; `field` names the file, config field or tensor, `reason` says why."""


class PoolError(StartError):
    """The pools cannot be made: the reason names what does not fit."""


class SessionError(WorkerError):
    """The session with the cache service."""


class SessionLost(SessionError):
    """The stream to the cache service broke; the state on its other side is known again after `connect`."""


class LostPlace(SessionLost):
    """The cache service is neither where the worker's last reply left it nor one step further."""


class StepRejected(SessionLost):
    """The stream ended over the content of a step or of its reply: the same step may end the next stream, too."""


class UnaskedReply(StepRejected):
    """The reply is to another step, or to something that was not asked; nothing was applied."""


class SessionRefused(SessionError):
    """The cache service will not take this worker: another one has its name, or the two do not fit together."""


class StepsRejected(SessionError):
    """The cache service rejects this worker's steps, whatever they say: a new process does not send the same ones."""


class DeviceLost(WorkerError):
    """The device runs no launch any more; only a new process can use it."""
