from __future__ import annotations

import hashlib

import pytest
import xxhash

from tier_client.errors import PageRejected
from tier_client.page_codec import CODEC_RAW, PageKind, decode, encode_header
from tier_client.part_codec import PART_HEADER_BYTES, PagePart, cut_page, decode_part, encode_part_header

KIND = PageKind(CODEC_RAW, dtype=2, group=1, rank=3)
KEY = b"prefix/of/a/key/0123456789abcdef"
WRITE_ID = b"writing1"
PAGE = bytes(range(256)) * 3
PARTS = cut_page(len(PAGE), 300)


def digest(data: bytes | bytearray | memoryview) -> bytes:
    return xxhash.xxh3_128_digest(data)


def framed(part: PagePart, write_id: bytes = WRITE_ID, kind: PageKind = KIND, key: bytes = KEY) -> bytes:
    payload = PAGE[part.first_byte : part.first_byte + part.num_bytes]
    return encode_part_header(kind, key, part, write_id, payload, digest) + payload


def decoded(value: bytes, part: PagePart, write_id: bytes = b"") -> bytes:
    return bytes(decode_part(value, KIND, KEY, part, write_id, digest)[0])


@pytest.mark.parametrize(
    ("page_bytes", "part_bytes", "sizes"), [(10, 4, [4, 4, 2]), (8, 4, [4, 4]), (4, 4, [4]), (5, 9, [5])]
)
def test_a_page_is_cut_into_parts_of_one_size(page_bytes: int, part_bytes: int, sizes: list[int]) -> None:
    parts = cut_page(page_bytes, part_bytes)
    assert [part.num_bytes for part in parts] == sizes
    assert [part.first_byte for part in parts] == [number * part_bytes for number in range(len(sizes))]
    assert {(part.num_parts, part.page_bytes) for part in parts} == {(len(sizes), page_bytes)}


def test_round_trip_is_a_view_and_tells_its_writing() -> None:
    whole = b""
    for part in PARTS:
        value = bytearray(framed(part))
        payload, write_id = decode_part(value, KIND, KEY, part, WRITE_ID if part.number else b"", digest)
        assert payload.obj is value and write_id == WRITE_ID
        whole += payload
    assert whole == PAGE


def test_header_is_80_bytes_and_stable() -> None:
    """Values outlive the process that wrote them: the layout is a promise, so it is spelled out once more here."""
    part = PagePart(2, 3, 14, 7, 21)
    header = encode_part_header(
        PageKind(0, 2, 1, 3), b"key", part, b"12345678", b"payload", lambda data: hashlib.md5(bytes(data)).digest()
    )
    assert len(header) == PART_HEADER_BYTES == 80
    assert header[:16] == b"SCPG" + bytes([2, 0, 0, 0, 2, 0, 1, 0, 3, 0, 0, 0])
    assert header[16:32] == hashlib.md5(b"key").digest()
    assert header[32:48] == (7).to_bytes(8, "little") + (21).to_bytes(8, "little")
    assert header[48:64] == (2).to_bytes(4, "little") + (3).to_bytes(4, "little") + b"12345678"
    assert header[64:] == hashlib.md5(header[:64] + hashlib.md5(b"payload").digest()).digest()


@pytest.mark.parametrize("position", [*range(PART_HEADER_BYTES), PART_HEADER_BYTES + 1, -1])
def test_any_changed_byte_is_rejected(position: int) -> None:
    value = bytearray(framed(PARTS[1]))
    value[position] ^= 1
    with pytest.raises(PageRejected):
        decode_part(value, KIND, KEY, PARTS[1], WRITE_ID, digest)


@pytest.mark.parametrize("length", [0, 1, PART_HEADER_BYTES - 1, PART_HEADER_BYTES, PART_HEADER_BYTES + 299])
def test_a_shortened_part_is_rejected(length: int) -> None:
    with pytest.raises(PageRejected):
        decoded(framed(PARTS[0])[:length], PARTS[0])
    with pytest.raises(PageRejected, match="value length"):
        decoded(framed(PARTS[0]) + b"x", PARTS[0])


def test_a_part_in_anothers_place_is_rejected() -> None:
    with pytest.raises(PageRejected, match="part is"):
        decoded(framed(PARTS[0]), PARTS[1])
    with pytest.raises(PageRejected, match="part is"):
        decoded(framed(PARTS[0]), PARTS[0]._replace(num_parts=4))
    with pytest.raises(PageRejected, match="part is"):
        decoded(framed(PARTS[0]), PARTS[0]._replace(page_bytes=900))


def test_parts_of_two_writings_are_not_put_together() -> None:
    assert decoded(framed(PARTS[1]), PARTS[1], WRITE_ID)
    with pytest.raises(PageRejected, match="write id"):
        decoded(framed(PARTS[1], b"writing2"), PARTS[1], WRITE_ID)


@pytest.mark.parametrize("field", PageKind._fields)
def test_a_part_of_another_kind_or_key_is_rejected(field: str) -> None:
    with pytest.raises(PageRejected, match=field):
        decoded(framed(PARTS[0], kind=KIND._replace(**{field: 9})), PARTS[0])
    with pytest.raises(PageRejected, match="key digest"):
        decoded(framed(PARTS[0], key=KEY + b"x"), PARTS[0])


def test_a_part_is_no_page_and_a_page_no_part() -> None:
    (whole,) = cut_page(len(PAGE), len(PAGE))
    with pytest.raises(PageRejected, match="version"):
        decoded(encode_header(KIND, KEY, PAGE, digest) + PAGE, whole)
    with pytest.raises(PageRejected, match="version"):
        decode(framed(whole), KIND, KEY, len(PAGE), digest)


def test_a_part_is_as_long_as_it_says() -> None:
    with pytest.raises(ValueError, match="payload: 3 bytes for a part of 300"):
        encode_part_header(KIND, KEY, PARTS[0], WRITE_ID, b"abc", digest)
