"""Frames the parts of a page that is too large for one value: an 80-byte header in front of each part's bytes.

All parts but the last have one size. The parts of one writing carry its `write_id`: parts of two writings are never put
together, also where both are sound.

    offset  0     4   6     8     10    12   14   16         32           40         48     52        56       64
            magic ver codec dtype group rank zero key digest payload_len  page_bytes number num_parts write_id checksum
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from tier_client.errors import PageRejected
from tier_client.page_codec import DIGEST_BYTES, MAGIC, Digest, PageKind, expect, seal

PART_VERSION = 2
PART_HEADER_BYTES = 80
WRITE_ID_BYTES = 8

_FIELDS = struct.Struct("<4sHHHHHH16sQQII8s16s")
assert _FIELDS.size == PART_HEADER_BYTES


class PagePart(NamedTuple):
    """`num_bytes` bytes of a page from `first_byte` on, as part `number` of `num_parts`."""

    number: int
    num_parts: int
    first_byte: int
    num_bytes: int
    page_bytes: int


def cut_page(page_bytes: int, part_bytes: int) -> tuple[PagePart, ...]:
    """Returns the parts of a page, none longer than `part_bytes`."""
    starts = range(0, page_bytes, part_bytes)
    return tuple(
        PagePart(number, len(starts), first, min(part_bytes, page_bytes - first), page_bytes)
        for number, first in enumerate(starts)
    )


def encode_part_header(
    kind: PageKind, key: bytes, part: PagePart, write_id: bytes, payload: bytes | bytearray | memoryview, digest: Digest
) -> bytes:
    """Returns the header of a part's bytes; the two are sent one after the other, so nothing is copied."""
    if memoryview(payload).nbytes != part.num_bytes:
        raise ValueError(f"payload: {memoryview(payload).nbytes} bytes for a part of {part.num_bytes}")
    place = (part.num_bytes, part.page_bytes, part.number, part.num_parts)
    unsealed = _FIELDS.pack(MAGIC, PART_VERSION, *kind, 0, digest(key), *place, write_id, bytes(DIGEST_BYTES))
    return unsealed[:-DIGEST_BYTES] + seal(unsealed, payload, digest)


def decode_part(
    value: bytes | bytearray | memoryview, kind: PageKind, key: bytes, part: PagePart, write_id: bytes, digest: Digest
) -> tuple[memoryview, bytes]:
    """Returns the part's bytes, a view into `value`, and its write id.

    Raises PageRejected unless every field and the checksum are right. `write_id` is that of the part before, empty for
    the first one.
    """
    view = memoryview(value).cast("B")
    if view.nbytes < PART_HEADER_BYTES:
        raise PageRejected(f"{view.nbytes} bytes are less than a header")
    header = bytes(view[:PART_HEADER_BYTES])
    magic, version, codec, dtype, group, rank, zero, key_digest, *place, found_id, checksum = _FIELDS.unpack(header)
    expect("magic", magic, MAGIC)
    expect("version", version, PART_VERSION)
    for field, found, wanted in zip(PageKind._fields, (codec, dtype, group, rank), kind, strict=True):
        expect(field, found, wanted)
    expect("reserved field", zero, 0)
    expect("key digest", key_digest, digest(key))
    expect("part", place, [part.num_bytes, part.page_bytes, part.number, part.num_parts])
    expect("write id", found_id, write_id or found_id)
    expect("value length", view.nbytes, PART_HEADER_BYTES + part.num_bytes)
    payload = view[PART_HEADER_BYTES:]
    expect("checksum", checksum, seal(header, payload, digest))
    return payload, found_id
