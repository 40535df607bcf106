"""Page hashes of a path, computed as far as they are asked for. Tokens are chained as workers' prompts are.

An id of a foreign engine names its page with all before it, so it is hashed alone, with the namespace: the same ids
under another salt are other pages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from hashlib import sha256

from cache_service.core.attachments.messages import Attach, Path
from cache_service.core.base.page_hash import PromptHashes, frame, namespace_digest
from session.words import HASH_BYTES, TOKEN_BYTES, Namespace

_ID_TAG = b"stemcache.page-id.1"
_LAYOUT_TAG = b"stemcache.attached.1"


class PathHashes(ABC):
    """`num_pages` whole pages, of which a prompt can reuse `reusable_pages`."""

    num_pages: int
    reusable_pages: int
    digest: bytes

    @abstractmethod
    def run(self, first: int, end: int) -> Sequence[bytes]:
        """Returns the hashes of pages first .. end - 1."""


class TokenHashes(PathHashes):
    """Of a path in tokens. The last token of a prompt is always computed, so its page cannot be reused."""

    def __init__(self, namespace: Namespace, tokens: bytes, page_tokens: int) -> None:
        size = page_tokens * TOKEN_BYTES
        self._hashes = PromptHashes(namespace, tokens, size)
        self.digest = self._hashes.digest
        self.num_pages, self.reusable_pages = len(tokens) // size, (len(tokens) - 1) // size

    def run(self, first: int, end: int) -> Sequence[bytes]:
        return self._hashes.run(first, end)


class IdHashes(PathHashes):
    """Of a path in ids. The engine names only pages that it can reuse."""

    def __init__(self, namespace: Namespace, page_ids: bytes) -> None:
        self.digest = namespace_digest(namespace)
        self._page_ids = page_ids
        self._head = sha256(frame(_ID_TAG) + frame(self.digest))
        self._known: list[bytes] = []
        self.num_pages = self.reusable_pages = len(page_ids) // HASH_BYTES

    def run(self, first: int, end: int) -> Sequence[bytes]:
        known = self._known
        while len(known) < end:
            state = self._head.copy()
            state.update(self._page_ids[len(known) * HASH_BYTES : (len(known) + 1) * HASH_BYTES])
            known.append(state.digest())
        return known[first:end]


def hash_path(namespace: Namespace, path: Path, page_tokens: int) -> PathHashes:
    """Returns the hashes of either form of a path."""
    if path.tokens:
        return TokenHashes(namespace, path.tokens, page_tokens)
    return IdHashes(namespace, path.page_ids)


def layout_fingerprint(attach: Attach) -> bytes:
    """Returns the fingerprint of an engine's rows and keys.

    It covers groups and ranks, too, so no engine finds rows of a worker, or of an engine with other pages.
    """
    fields = [attach.fingerprint, attach.page_tokens.to_bytes(8, "little"), attach.num_ranks.to_bytes(8, "little")]
    for spec in attach.groups:
        fields.append(spec.name.encode())
        kind = spec.kind | spec.replicated << 32
        fields += [value.to_bytes(8, "little") for value in (kind, spec.window_tokens, spec.page_bytes)]
    return sha256(frame(_LAYOUT_TAG) + b"".join(map(frame, fields))).digest()
