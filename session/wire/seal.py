"""The envelope of a session's messages: a serialized body and its checksum.

A page id with a flipped bit names another page, so no body is read before its checksum agrees.
"""

from __future__ import annotations

import zlib
from typing import TypeVar

from google.protobuf.message import DecodeError

from protos.v1 import cache_pb2
from session.errors import Damaged, InvalidInput

# The field that a Damaged names.
CHECKSUM_FIELD = "session.crc32"

M = TypeVar("M", cache_pb2.WorkerMessage, cache_pb2.ManagerMessage)


def seal_request(message: cache_pb2.WorkerMessage) -> cache_pb2.SessionRequest:
    body = message.SerializeToString()
    return cache_pb2.SessionRequest(body=body, crc32=zlib.crc32(body))


def seal_response(message: cache_pb2.ManagerMessage) -> cache_pb2.SessionResponse:
    body = message.SerializeToString()
    return cache_pb2.SessionResponse(body=body, crc32=zlib.crc32(body))


def open_request(envelope: cache_pb2.SessionRequest) -> cache_pb2.WorkerMessage:
    """Returns the message inside. Raises Damaged, or InvalidInput for a body that is no message."""
    return _opened(cache_pb2.WorkerMessage, envelope.body, envelope.crc32, "a worker")


def open_response(envelope: cache_pb2.SessionResponse) -> cache_pb2.ManagerMessage:
    """Returns the message inside. Raises Damaged, or InvalidInput for a body that is no message."""
    return _opened(cache_pb2.ManagerMessage, envelope.body, envelope.crc32, "the cache service")


def _opened(kind: type[M], body: bytes, crc32: int, peer: str) -> M:
    if zlib.crc32(body) != crc32:
        raise Damaged(CHECKSUM_FIELD, f"is not that of the body's {len(body)} bytes")
    try:
        return kind.FromString(body)
    except DecodeError:
        raise InvalidInput("session.body", f"{len(body)} bytes that are no message of {peer}") from None
