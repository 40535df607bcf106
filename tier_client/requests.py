"""The requests of HostTier. What no request can carry is told by the name of its field."""

from __future__ import annotations

import logging
import re
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from google.protobuf.message import Message

from protos.v1 import host_tier_pb2
from session.words import HASH_BYTES
from tier_client.values import Attachment, PagePath, PageRange, TierClientConfig

PROTOCOL_VERSION = 1
# Mistakes of which the log has told.
MAX_TOLD = 256

# Of what is in no message: numbers out of range, texts that are no UTF-8 (a UnicodeError is a ValueError), other types.
_REJECTED = (ValueError, TypeError, OverflowError, AttributeError)

_Message = TypeVar("_Message", bound=Message)


class Unsendable(ValueError):
    """No request can carry this value; the text begins with the field's name."""


class Mistakes:
    """Logs each mistake of the engine once: what it does wrong, it does in each of its calls, with other numbers. Any
    number of threads may tell one."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._told: set[str] = set()

    def tell(self, text: str) -> None:
        mistake = re.sub(r"-?\d+", "0", text)
        if mistake in self._told:
            return
        if len(self._told) >= MAX_TOLD:
            self._told.clear()
        self._told.add(mistake)
        self._log.warning("%s", text)


def message(kind: type[_Message], where: str = "", /, **fields: Any) -> _Message:
    """Raises Unsendable. To protobuf None is a field that is not set, which is another request."""
    for name, value in fields.items():
        if value is None:
            raise Unsendable(f"{where}{name}: is None")
    try:
        return kind(**fields)
    except _REJECTED as error:
        raise _named(kind, where, fields, error) from None


def _named(kind: type[Message], where: str, fields: dict[str, Any], error: Exception) -> Unsendable:
    """Returns the error with the field's name, which protobuf does not say."""
    for name, value in fields.items():
        try:
            kind(**{name: value})
        except _REJECTED as its_error:
            return Unsendable(f"{where}{name}: {its_error}")
    return Unsendable(f"{where}{error}")


def attach_request(config: TierClientConfig) -> host_tier_pb2.AttachRequest:
    """Returns all of it but the store's identity. Raises Unsendable."""
    if not config.groups:
        raise Unsendable("groups: there are none")
    groups = [
        message(host_tier_pb2.TierGroup, f"groups[{number}].", **group._asdict())
        for number, group in enumerate(config.groups)
    ]
    return message(
        host_tier_pb2.AttachRequest,
        protocol_version=PROTOCOL_VERSION,
        engine=config.engine,
        fingerprint=config.attached_fingerprint(),
        model=config.model,
        page_tokens=config.page_tokens,
        groups=groups,
        num_ranks=config.num_ranks,
    )


def names(attachment: Attachment) -> dict[str, Any]:
    """Returns the fields by which a request names its attachment."""
    return {"epoch": attachment.epoch, "attachment": attachment.number}


def leading(path: PagePath, max_pages: int, page_tokens: int) -> host_tier_pb2.TierPath:
    """Returns the first pages of a path, as many as the service takes. Raises Unsendable."""
    try:
        ids = path.page_ids[: max_pages * HASH_BYTES]
        given = path.tokens[: max_pages * page_tokens + 1]
    except _REJECTED as error:
        raise Unsendable(f"path: {error}") from None
    try:
        tokens = array("i", given).tobytes()
    except _REJECTED as error:
        raise Unsendable(f"path.tokens: {error}") from None
    return message(host_tier_pb2.TierPath, "path.", adapter=path.adapter, salt=path.salt, page_ids=ids, tokens=tokens)


def page_ranges(asked: Iterable[PageRange], max_pages: int) -> list[host_tier_pb2.TierPageRange]:
    """Returns what there is of them within the first `max_pages`. Raises Unsendable."""
    found = []
    for number, one in enumerate(asked):
        where = f"ranges[{number}]"
        try:
            count = min(one.end_page, max_pages) - one.first_page
            is_some = bool(count > 0)
        except _REJECTED as error:
            raise Unsendable(f"{where}: {error}") from None
        if is_some:
            fields = {"group": one.group, "first_page": one.first_page, "num_pages": count}
            found.append(message(host_tier_pb2.TierPageRange, f"{where}.", **fields))
    return found


def commit_request(
    attachment: Attachment, page_bytes: Sequence[int], written: Sequence[tuple[int, int]], **fields: Any
) -> host_tier_pb2.CommitRequest:
    """`page_bytes`: by group. Raises Unsendable."""
    told = []
    for number, (group, count) in enumerate(written):
        where = f"written[{number}]."
        if group not in range(len(page_bytes)):
            raise Unsendable(f"{where}group: {group!r}; there are {len(page_bytes)}")
        one = message(host_tier_pb2.WrittenPages, where, group=group, num_pages=count)
        one.num_bytes = one.num_pages * page_bytes[group]
        told.append(one)
    return message(host_tier_pb2.CommitRequest, **names(attachment), written=told, **fields)


def release_request(attachment: Attachment, **end: Any) -> host_tier_pb2.ReleaseRequest:
    """`end`: the fields of one LeaseEnd. Raises Unsendable."""
    ends = [message(host_tier_pb2.LeaseEnd, **end)]
    return message(host_tier_pb2.ReleaseRequest, **names(attachment), ends=ends)
