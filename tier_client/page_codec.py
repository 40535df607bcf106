"""Frames a page for the host tier: a 64-byte header in front of its bytes, checked whole before the page is used again.

The digest function is an argument. What is rejected here is reported as CORRUPT by transfer/page_mover.py; the pages
before it count. Pages that are too large for one value are framed by part_codec.py.

    offset  0        4     6     8      10     12    14    16          32           40            48          64
            magic    ver   codec dtype  group  rank  zero  key digest  payload_len  unpacked_len  checksum    payload
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

from tier_client.errors import PageRejected

MAGIC = b"SCPG"
VERSION = 1
HEADER_BYTES = 64
DIGEST_BYTES = 16
CODEC_RAW = 0

# The 128-bit digest of some bytes: xxh3-128 in production.
Digest = Callable[[bytes | bytearray | memoryview], bytes]

_FIELDS = struct.Struct("<4sHHHHHH16sQQ16s")
assert _FIELDS.size == HEADER_BYTES


class PageKind(NamedTuple):
    """What must agree between the writer and the reader of a page, besides the key."""

    codec: int
    dtype: int
    group: int
    rank: int


def encode_header(kind: PageKind, key: bytes, payload: bytes | bytearray | memoryview, digest: Digest) -> bytes:
    """Returns the header of an uncompressed payload; the two are sent as parts, so nothing is copied."""
    num_bytes = memoryview(payload).nbytes
    unsealed = _FIELDS.pack(MAGIC, VERSION, *kind, 0, digest(key), num_bytes, num_bytes, bytes(DIGEST_BYTES))
    return unsealed[:-DIGEST_BYTES] + seal(unsealed, payload, digest)


def decode(
    value: bytes | bytearray | memoryview, kind: PageKind, key: bytes, payload_bytes: int, digest: Digest
) -> memoryview:
    """Returns the payload, a view into `value`. Raises PageRejected unless every field and the checksum are right."""
    view = memoryview(value).cast("B")
    if view.nbytes < HEADER_BYTES:
        raise PageRejected(f"{view.nbytes} bytes are less than a header")
    header = bytes(view[:HEADER_BYTES])
    magic, version, codec, dtype, group, rank, zero, key_digest, stored_len, unpacked_len, checksum = _FIELDS.unpack(
        header
    )
    expect("magic", magic, MAGIC)
    expect("version", version, VERSION)
    for field, found, wanted in zip(PageKind._fields, (codec, dtype, group, rank), kind, strict=True):
        expect(field, found, wanted)
    expect("reserved field", zero, 0)
    expect("key digest", key_digest, digest(key))
    expect("payload length", stored_len, payload_bytes)
    expect("unpacked length", unpacked_len, payload_bytes)
    expect("value length", view.nbytes, HEADER_BYTES + payload_bytes)
    payload = view[HEADER_BYTES:]
    expect("checksum", checksum, seal(header, payload, digest))
    return payload


def seal(header: bytes, payload: bytes | bytearray | memoryview, digest: Digest) -> bytes:
    """Returns a digest over the header's fields and the payload's digest."""
    return digest(header[:-DIGEST_BYTES] + digest(payload))


def expect(field: str, found: object, wanted: object) -> None:
    """Raises PageRejected where a field is not what it should be."""
    if found != wanted:
        raise PageRejected(f"{field} is {found!r}, not {wanted!r}")
