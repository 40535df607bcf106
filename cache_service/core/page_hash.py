"""Chained content hash of a page: a pure function of namespace, parent hash and tokens.

Knows no tree and no store. Every field is framed by its length, so that no two different inputs share an encoding.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import sha256

from cache_service.core.types import HASH_BYTES, Namespace, PageHash

_NAMESPACE_TAG = b"stemcache.namespace.1"
_PAGE_TAG = b"stemcache.page.1"


def _frame(field: bytes) -> bytes:
    return len(field).to_bytes(8, "little") + field


@lru_cache(maxsize=4096)
def namespace_digest(namespace: Namespace) -> bytes:
    """What every page hash of the namespace starts from."""
    return sha256(_frame(_NAMESPACE_TAG) + b"".join(_frame(field.encode()) for field in namespace)).digest()


def page_hashes(digest: bytes, parent: bytes, tokens: bytes | bytearray, page_bytes: int) -> bytes:
    """Hashes of the whole pages in `tokens`, packed, chained on from `parent` (empty at the start of a prompt)."""
    head = _frame(_PAGE_TAG) + _frame(digest)
    inner = head + HASH_BYTES.to_bytes(8, "little")
    length = page_bytes.to_bytes(8, "little")
    before = inner + parent if parent else head + bytes(8)
    out = []
    for start in range(0, len(tokens), page_bytes):
        hashed = sha256(b"".join((before, length, tokens[start : start + page_bytes]))).digest()
        out.append(hashed)
        before = inner + hashed
    return b"".join(out)


def page_hash(digest: bytes, parent: bytes, tokens: bytes) -> PageHash:
    """Hash of one page."""
    return PageHash(page_hashes(digest, parent, tokens, len(tokens)))
