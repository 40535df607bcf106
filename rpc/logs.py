"""Logs as JSON lines, with the request id of the call that is being served, and with secrets struck out."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any, TextIO
from urllib.parse import urlsplit

from rpc.address import HostPort
from rpc.request_id import current_request_id

REDACTED = "***"
LEVELS = ("debug", "info", "warning", "error")

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def set_up_logging(service: str, level: str = "info", stream: TextIO | None = None) -> None:
    """Sends every record of the process to `stream` (stderr), one JSON object a line."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines(service))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def announcement(service: str, **facts: str | HostPort | None) -> str:
    """Returns a JSON line in the form of the log that says where a service listens. Empty facts are left out."""
    head = {"time": _timestamp(time.time()), "level": "info", "service": service, "logger": service}
    said = {"message": "listening", "event": "listening"}
    return json.dumps({**head, **said, **{name: str(fact) for name, fact in facts.items() if fact}})


class Outage:
    """Logs the first failure of a series, and how many there were at its end: a line a second would hide the others."""

    def __init__(self, log: logging.Logger, what: str) -> None:
        self._log = log
        self._what = what
        self._since_s = 0.0
        self._num_failures = 0

    def failed(self, error: Exception) -> None:
        if not self._num_failures:
            self._since_s = time.monotonic()
            self._log.warning("%s: %s; trying on", self._what, error)
        self._num_failures += 1

    def ended(self) -> None:
        if self._num_failures:
            lasted = {"failures": self._num_failures, "seconds": round(time.monotonic() - self._since_s, 3)}
            self._log.info("%s is over", self._what, extra=lasted)
        self._num_failures = 0


class JsonLines(logging.Formatter):
    """One JSON object a record: time, level, service, logger, message, request id, then the record's extras."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _timestamp(record.created),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := current_request_id():
            line["request_id"] = request_id
        line.update((key, value) for key, value in vars(record).items() if key not in _STANDARD)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _timestamp(seconds: float) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1000):03d}Z"


def redact_url(url: str) -> str:
    """Returns the URL without its password, options and fragment; user, host, port and path stay readable.

    All of it is struck out where a part may be the rest of a password: an unescaped "/", "?" or "#" in one leaves an
    "@" behind the host, or a port that is no number.
    """
    try:
        parts = urlsplit(url)
        password = parts.password
        _ = parts.port  # raises for one that is no number
    except ValueError:
        return REDACTED
    if not parts.scheme or "@" in parts.path + parts.query + parts.fragment:
        return REDACTED
    user, at, host = parts.netloc.rpartition("@")
    if password is not None:
        user = f"{parts.username or ''}:{REDACTED}"
    # An option may be a password, too: redis-py takes ?password=.
    options, fragment = f"?{REDACTED}" * bool(parts.query), f"#{REDACTED}" * bool(parts.fragment)
    return f"{parts.scheme}://{user}{at}{host}{parts.path}{options}{fragment}"
