from __future__ import annotations

import hashlib

import pytest
import xxhash

from tier_client.errors import PageRejected
from tier_client.page_codec import CODEC_RAW, HEADER_BYTES, MAGIC, PageKind, decode, encode_header

KIND = PageKind(CODEC_RAW, dtype=2, group=1, rank=3)
KEY = b"prefix/of/a/key/0123456789abcdef"
PAYLOAD = bytes(range(256)) * 3


def digest(data: bytes | bytearray | memoryview) -> bytes:
    return xxhash.xxh3_128_digest(data)


def framed(kind: PageKind = KIND, key: bytes = KEY, payload: bytes = PAYLOAD) -> bytes:
    return encode_header(kind, key, payload, digest) + payload


def test_round_trip_is_a_view_into_the_value() -> None:
    value = bytearray(framed())
    payload = decode(value, KIND, KEY, len(PAYLOAD), digest)
    assert payload == PAYLOAD
    assert payload.obj is value
    assert value[:4] == MAGIC


def test_header_is_64_bytes_and_stable() -> None:
    """Values outlive the process that wrote them: the layout is a promise, so it is spelled out once more here."""
    header = encode_header(PageKind(0, 2, 1, 3), b"key", b"payload", lambda data: hashlib.md5(bytes(data)).digest())
    assert len(header) == HEADER_BYTES == 64
    assert header[:16] == b"SCPG" + bytes([1, 0, 0, 0, 2, 0, 1, 0, 3, 0, 0, 0])
    assert header[16:32] == hashlib.md5(b"key").digest()
    assert header[32:48] == (7).to_bytes(8, "little") * 2
    sealed = header[:48] + hashlib.md5(b"payload").digest()
    assert header[48:] == hashlib.md5(sealed).digest()


@pytest.mark.parametrize("position", range(HEADER_BYTES))
def test_any_changed_header_byte_is_rejected(position: int) -> None:
    value = bytearray(framed())
    value[position] ^= 1
    with pytest.raises(PageRejected):
        decode(value, KIND, KEY, len(PAYLOAD), digest)


@pytest.mark.parametrize("position", [0, 1, len(PAYLOAD) // 2, len(PAYLOAD) - 1])
def test_any_changed_payload_byte_is_rejected(position: int) -> None:
    value = bytearray(framed())
    value[HEADER_BYTES + position] ^= 0x80
    with pytest.raises(PageRejected, match="checksum"):
        decode(value, KIND, KEY, len(PAYLOAD), digest)


@pytest.mark.parametrize("length", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + len(PAYLOAD) - 1])
def test_a_shortened_value_is_rejected(length: int) -> None:
    with pytest.raises(PageRejected):
        decode(framed()[:length], KIND, KEY, len(PAYLOAD), digest)


def test_a_value_with_more_behind_it_is_rejected() -> None:
    with pytest.raises(PageRejected, match="value length"):
        decode(framed() + b"x", KIND, KEY, len(PAYLOAD), digest)


@pytest.mark.parametrize(("field", "other"), [(name, KIND._replace(**{name: 9})) for name in KIND._fields])
def test_a_page_of_another_kind_is_rejected(field: str, other: PageKind) -> None:
    with pytest.raises(PageRejected, match=field):
        decode(framed(), other, KEY, len(PAYLOAD), digest)


def test_a_whole_page_under_another_key_is_rejected() -> None:
    with pytest.raises(PageRejected, match="key digest"):
        decode(framed(), KIND, KEY + b"x", len(PAYLOAD), digest)


def test_a_whole_page_of_another_length_is_rejected() -> None:
    with pytest.raises(PageRejected, match="payload length"):
        decode(framed(), KIND, KEY, len(PAYLOAD) - 1, digest)


def test_payload_may_be_any_buffer() -> None:
    as_view = encode_header(KIND, KEY, memoryview(bytearray(PAYLOAD)), digest)
    assert as_view == encode_header(KIND, KEY, PAYLOAD, digest)
