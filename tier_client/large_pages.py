"""Moves a page that is too large for one value, a recurrent state's snapshot for one: part by part.

Workers and other projects' engines both use it, so they cut, frame and check in one way.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from typing import NamedTuple, Protocol

from tier_client.errors import PageAbsent, PageRejected
from tier_client.page_codec import Digest, PageKind
from tier_client.part_codec import (
    PART_HEADER_BYTES,
    WRITE_ID_BYTES,
    PagePart,
    cut_page,
    decode_part,
    encode_part_header,
)

# The default of `host_part_kb`, in bytes.
PART_BYTES = 4 << 20


class PartTier(Protocol):
    """A store of values in parts."""

    def put_parts(self, key: bytes, parts: Iterable[Sequence[bytes | memoryview]]) -> bool: ...

    def get_parts(self, key: bytes, num_parts: int, max_bytes: int) -> Generator[bytearray | None, None, None]: ...


class LargePage(NamedTuple):
    """A page of `page_bytes`, more than `part_bytes`, under `key`."""

    kind: PageKind
    key: bytes
    page_bytes: int
    part_bytes: int

    def put(self, tier: PartTier, payload_of: Callable[[PagePart], memoryview], digest: Digest) -> bool:
        """Returns False where the store is full. Raises HostTierError.

        A part's payload is asked for when it is sent, and is not needed any more when the next one is.
        """
        return tier.put_parts(self.key, self._framed(payload_of, digest))

    def get(self, tier: PartTier, digest: Digest) -> Generator[tuple[PagePart, memoryview], None, None]:
        """Yields each part with its payload, verified, as it comes: the page is whole at the end only.

        Raises PageAbsent, PageRejected, HostTierError.
        """
        cut, write_id = self._cut(), b""
        with closing(tier.get_parts(self.key, len(cut), self.part_bytes + PART_HEADER_BYTES)) as values:
            for part in cut:
                value = next(values, None)
                if value is None:
                    raise PageAbsent(f"part {part.number} is not there")
                try:
                    payload, write_id = decode_part(value, self.kind, self.key, part, write_id, digest)
                except PageRejected as error:
                    raise PageRejected(f"part {part.number}: {error}") from None
                yield part, payload

    def _cut(self) -> tuple[PagePart, ...]:
        return cut_page(self.page_bytes, self.part_bytes)

    def _framed(
        self, payload_of: Callable[[PagePart], memoryview], digest: Digest
    ) -> Iterator[tuple[bytes, memoryview]]:
        write_id = secrets.token_bytes(WRITE_ID_BYTES)
        for part in self._cut():
            payload = payload_of(part)
            yield encode_part_header(self.kind, self.key, part, write_id, payload, digest), payload


def parts_text(largest_page_bytes: int, part_bytes: int) -> tuple[str, ...]:
    """Returns what a fingerprint says of parts: their size, where some page is larger.

    Engines that cut pages into other sizes cannot read them.
    """
    return (f"parts of {part_bytes}",) if largest_page_bytes > part_bytes else ()
