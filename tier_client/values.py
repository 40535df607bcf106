"""Arguments and results of the client of HostTier."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from session.words import HASH_BYTES, GroupKind
from tier_client.large_pages import PART_BYTES, parts_text


class PageGroup(NamedTuple):
    """A family of pages with one resume rule; `page_bytes` of one page on one rank.

    `replicated`: every rank has the same bytes; rank 0 writes them for all.
    """

    name: str
    kind: GroupKind
    page_bytes: int
    window_tokens: int = 0
    replicated: bool = False


@dataclass(frozen=True, slots=True)
class TierClientConfig:
    """Who attaches, and to what. `fingerprint`: see `fingerprint_of`.

    `call_timeout_s` is for one call of the service, `store_timeout_s` for one command of up to eight values,
    `transfer_timeout_s` for all pages of one group in a fetch or a save. After a failure nothing is asked for
    `pause_s`. Pages of more than `part_bytes` move in parts; engines that cut them otherwise share none.
    `compute_tokens_per_s`: with it, what is computed sooner than read is not granted; 0: read whatever is there.
    """

    cache_address: str
    redis_url: str
    engine: str
    model: str
    fingerprint: bytes
    page_tokens: int
    groups: tuple[PageGroup, ...]
    num_ranks: int = 1
    rank: int = 0
    call_timeout_s: float = 0.25
    store_timeout_s: float = 1.0
    transfer_timeout_s: float = 5.0
    pause_s: float = 2.0
    num_connections: int = 4
    part_bytes: int = PART_BYTES
    compute_tokens_per_s: float = 0.0

    def __post_init__(self) -> None:
        if len(self.fingerprint) != HASH_BYTES:
            raise ValueError(f"fingerprint: {HASH_BYTES} bytes, not {len(self.fingerprint)}")
        if not 0 <= self.rank < self.num_ranks:
            raise ValueError(f"rank: {self.rank} of {self.num_ranks}")
        for name in ("call_timeout_s", "store_timeout_s", "transfer_timeout_s", "pause_s", "part_bytes"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}: must be positive, and finite")
        if not 0 <= self.compute_tokens_per_s < math.inf:
            raise ValueError("compute_tokens_per_s: must not be negative, and finite")
        try:
            self.cache_address.encode()
        except UnicodeEncodeError:
            raise ValueError("cache_address: must be UTF-8") from None

    def attached_fingerprint(self) -> bytes:
        """Returns `fingerprint`, and where some page is larger than a part, the size of parts."""
        parts = parts_text(max(group.page_bytes for group in self.groups), self.part_bytes)
        return fingerprint_of({"engine": self.fingerprint.hex(), "parts": parts}) if parts else self.fingerprint


class PagePath(NamedTuple):
    """Pages counted from 0: ids of 32 bytes each, each of its page and all before it; or the prompt's tokens."""

    page_ids: bytes = b""
    tokens: Sequence[int] = ()
    adapter: str = ""
    salt: str = ""


class PageRange(NamedTuple):
    """Pages first_page .. end_page - 1 of a group."""

    group: int
    first_page: int
    end_page: int


class KeyedPages(NamedTuple):
    """Pages of one group, by their numbers in the path: a hash for each, from which a rank's key is made."""

    group: int
    key_prefix: str
    pages: tuple[int, ...]
    page_hashes: tuple[bytes, ...]
    replicated: bool = False

    def keys(self, rank: int) -> list[bytes]:
        rank = 0 if self.replicated else rank
        return [f"{self.key_prefix}{rank}:{page_hash.hex()}".encode() for page_hash in self.page_hashes]


class Attachment(NamedTuple):
    """Names the attachment in calls: a lease or a ticket is one of it, and ends with it."""

    epoch: str
    number: int


NOT_ATTACHED = Attachment("", 0)


class Hit(NamedTuple):
    """Where the engine can resume when it has read `pages`; `lease` is 0 when there is nothing to read."""

    usable_pages: int
    local_pages: int = 0
    lease: int = 0
    pages: tuple[KeyedPages, ...] = ()
    miss_reason: str = ""
    limiting_group: str = ""
    attachment: Attachment = NOT_ATTACHED


class Ticket(NamedTuple):
    """Pages to write, of `num_asked`; `number` is 0 when there are none. `num_refused` pages found no room.

    May be handed to the processes of other ranks.
    """

    number: int = 0
    pages: tuple[KeyedPages, ...] = ()
    num_refused: int = 0
    attachment: Attachment = NOT_ATTACHED
    num_asked: int = 0


class Loaded(NamedTuple):
    """`values[group][page]` are the bytes of pages, verified; resume at `usable_pages`."""

    usable_pages: int
    values: Mapping[int, Mapping[int, memoryview]]


def fingerprint_of(facts: Mapping[str, object]) -> bytes:
    """Returns 32 bytes over everything that decides what a page's bytes mean: names and values, in any order.

    To be named: the model's digest, its dtype and that of its pages, the layout of a page, the engine and its version,
    how it makes page ids.
    """
    digest = hashlib.sha256()
    for name, value in sorted(facts.items()):
        # A path that is no UTF-8 has lone surrogates in Python: it is another fact, and no error.
        for field in (name.encode(errors="surrogatepass"), str(value).encode(errors="surrogatepass")):
            digest.update(len(field).to_bytes(8, "little") + field)
    return digest.digest()
