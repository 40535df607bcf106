"""Chained content hash of a page: a pure function of namespace, parent hash and tokens.

It keeps namespaces apart in hashes and in the host tier's keys; on the device each has a root of its own
(`RadixTree.roots`). Every field is framed by its length, so that no two different inputs share an encoding.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import sha256

from session.words import HASH_BYTES, Namespace, PageHash

_NAMESPACE_TAG = b"stemcache.namespace.1"
_PAGE_TAG = b"stemcache.page.1"


def frame(field: bytes) -> bytes:
    """Returns the field with its length in front."""
    return len(field).to_bytes(8, "little") + field


@lru_cache(maxsize=4096)
def namespace_digest(namespace: Namespace) -> bytes:
    """Returns the digest that the namespace's page hashes are chained from."""
    return sha256(frame(_NAMESPACE_TAG) + b"".join(frame(field.encode()) for field in namespace)).digest()


def page_hashes(digest: bytes, parent: bytes, tokens: bytes | bytearray, page_key_bytes: int) -> bytes:
    """Hashes of the whole pages in `tokens`, packed, chained on from `parent` (empty at the start of a prompt)."""
    return b"".join(chain(digest, parent, tokens, page_key_bytes))


def chain(digest: bytes, parent: bytes, tokens: bytes | bytearray, page_key_bytes: int) -> list[bytes]:
    """Returns the same hashes as a list."""
    head = frame(_PAGE_TAG) + frame(digest)
    length = page_key_bytes.to_bytes(8, "little")
    inner = sha256(head + HASH_BYTES.to_bytes(8, "little"))
    first = inner if parent else sha256(head + bytes(8))
    hashed, out = parent, []
    for start in range(0, len(tokens), page_key_bytes):
        # A copy of the hashed head costs 0.6 us a page, hashing the head again 0.95 us.
        state = (inner if start else first).copy()
        state.update(hashed + length + tokens[start : start + page_key_bytes])
        hashed = state.digest()
        out.append(hashed)
    return out


class PromptHashes:
    """Page hashes of one prompt from its start, computed as far as needed.

    Shared by the matches of many workers, so that a prompt is hashed once and not once for each worker.
    """

    __slots__ = ("_known", "_page_key_bytes", "_tokens", "digest", "reach")

    def __init__(self, namespace: Namespace, tokens: bytes, page_key_bytes: int) -> None:
        self.digest = namespace_digest(namespace)
        self._tokens, self._page_key_bytes = tokens, page_key_bytes
        self._known: list[bytes] = []
        self.reach: dict[object, list[tuple[int, int]]] = {}
        """Kept by `prefix_match`: runs of pages that a host tier holds."""

    @property
    def num_pages(self) -> int:
        """Pages whose hashes are known."""
        return len(self._known)

    def seed(self, packed: bytes) -> None:
        """Takes over hashes of leading pages that the tree has already."""
        first = len(self._known) * HASH_BYTES
        self._known += [packed[at : at + HASH_BYTES] for at in range(first, len(packed), HASH_BYTES)]

    def run(self, first: int, end: int) -> list[bytes]:
        """Returns the packed hashes of pages first .. end - 1."""
        known, size = self._known, self._page_key_bytes
        if end > len(known):
            tokens = self._tokens[len(known) * size : end * size]
            known += chain(self.digest, known[-1] if known else b"", tokens, size)
        return known[first:end]


def page_hash(digest: bytes, parent: bytes, tokens: bytes) -> PageHash:
    """Returns the hash of one page."""
    return PageHash(page_hashes(digest, parent, tokens, len(tokens)))
