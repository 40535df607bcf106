"""Gives every call a request id: the caller's, or one drawn here.

Logs read the id from the context.
"""

from __future__ import annotations

import random
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rpc.interceptor import Call, Proceed

METADATA_KEY = "x-request-id"
MAX_LENGTH = 64

_request_id: ContextVar[str] = ContextVar("request_id", default="")


def current_request_id() -> str:
    """Returns the id of the call that is being served, or an empty string outside of one."""
    return _request_id.get()


def draw_request_id() -> str:
    """Returns a random id. It is no secret, so it is drawn without a system call."""
    return f"{random.getrandbits(64):016x}"


def accepted_request_id(offered: str | bytes | None) -> str:
    """Returns the caller's id if it is short and safe in a log line, else a new one."""
    if isinstance(offered, str) and 0 < len(offered) <= MAX_LENGTH and offered.isascii() and offered.isprintable():
        return offered
    return draw_request_id()


async def with_request_id(call: Call, proceed: Proceed) -> Any:
    """Middleware inside of which `current_request_id` returns the call's id."""
    token = _request_id.set(accepted_request_id(_offered(call)))
    try:
        return await proceed()
    finally:
        _request_id.reset(token)


def _offered(call: Call) -> str | bytes | None:
    return next((value for key, value in call.context.invocation_metadata() or () if key == METADATA_KEY), None)
