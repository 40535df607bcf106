"""Page hashes: golden vectors, recomputed here field by field, and framing."""

from __future__ import annotations

from array import array
from hashlib import sha256

import pytest

from cache_service.core.base.page_hash import namespace_digest, page_hash, page_hashes
from session.words import Namespace

NAMESPACE = Namespace("model", "", "salt")
TOKENS = array("i", range(8)).tobytes()


def frame(field: bytes) -> bytes:
    return len(field).to_bytes(8, "little") + field


def test_golden_vectors() -> None:
    """These keys stand in stores out there: a change of any byte must be a decision."""
    digest = namespace_digest(NAMESPACE)
    hashes = page_hashes(digest, b"", TOKENS, 16)
    assert digest.hex() == "a829d63624162863740ab089e1fa52ce201d290cdfd234a0890e2d158384fd2d"
    assert hashes[:32].hex() == "bdec3a5be226da7fa86cd75fd62ab22d035e8ed04391f4ee8a4d4e38131fa89c"
    assert hashes[32:].hex() == "e858d100c6a484174bc74050377fb0c54d35bc830a7b698c511db91f6f869537"


def test_the_encoding_is_framed_field_by_field() -> None:
    digest = sha256(frame(b"stemcache.namespace.1") + frame(b"model") + frame(b"") + frame(b"salt")).digest()
    assert namespace_digest(NAMESPACE) == digest
    first = sha256(frame(b"stemcache.page.1") + frame(digest) + frame(b"") + frame(TOKENS[:16])).digest()
    second = sha256(frame(b"stemcache.page.1") + frame(digest) + frame(first) + frame(TOKENS[16:])).digest()
    assert page_hashes(digest, b"", TOKENS, 16) == first + second


@pytest.mark.parametrize("page_bytes", [4, 8, 16])
def test_incremental_equals_one_shot(page_bytes: int) -> None:
    digest = namespace_digest(NAMESPACE)
    whole = page_hashes(digest, b"", TOKENS, page_bytes)
    parent, steps = b"", b""
    for at in range(0, len(TOKENS), page_bytes):
        parent = page_hash(digest, parent, TOKENS[at : at + page_bytes])
        steps += parent
    assert whole == steps


def test_fields_do_not_run_into_each_other() -> None:
    variants = [
        Namespace("ab", "c"),
        Namespace("a", "bc"),
        Namespace("a", "b", "c"),
        Namespace("abc"),
        Namespace("", "abc"),
    ]
    assert len({namespace_digest(namespace) for namespace in variants}) == len(variants)


def test_a_parent_hash_is_not_eight_tokens() -> None:
    digest = namespace_digest(NAMESPACE)
    parent = page_hash(digest, b"", TOKENS)
    assert page_hash(digest, parent, TOKENS) != page_hash(digest, b"", parent + TOKENS)


def test_each_earlier_token_changes_every_later_hash() -> None:
    digest = namespace_digest(NAMESPACE)
    other = array("i", [9, *range(1, 8)]).tobytes()
    one, two = page_hashes(digest, b"", TOKENS, 8), page_hashes(digest, b"", other, 8)
    assert all(one[at : at + 32] != two[at : at + 32] for at in range(0, len(one), 32))
