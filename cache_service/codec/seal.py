"""The envelope of a session's messages: a serialized body and its checksum.

A page id with a flipped bit names another page, so no body is read before its
checksum agrees.
"""

from __future__ import annotations

import zlib

from google.protobuf.message import DecodeError

from protos.v1 import cache_pb2
from session.errors import Damaged, InvalidInput


def opened(envelope: cache_pb2.SessionRequest) -> cache_pb2.WorkerMessage:
    """Raises Damaged, or InvalidInput for a body that is no message."""
    body = envelope.body
    if zlib.crc32(body) != envelope.crc32:
        raise Damaged("session.crc32", f"is not that of the body's {len(body)} bytes")
    try:
        return cache_pb2.WorkerMessage.FromString(body)
    except DecodeError:
        raise InvalidInput("session.body", f"{len(body)} bytes that are no message of a worker") from None


def sealed(message: cache_pb2.ManagerMessage) -> cache_pb2.SessionResponse:
    body = message.SerializeToString()
    return cache_pb2.SessionResponse(body=body, crc32=zlib.crc32(body))
