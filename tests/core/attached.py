"""An attached engine on a stage of its own: the manager, a store of values, and a resume rule told the slow way."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from typing import NamedTuple

from cache_service.core.attachments.attachment import Attachment
from cache_service.core.attachments.messages import (
    Attach,
    AttachmentId,
    Commit,
    Committed,
    Found,
    GroupRange,
    LeaseEnd,
    Lookup,
    Path,
    Reserve,
    Reserved,
    TierPages,
    WrittenPages,
)
from cache_service.core.cache_manager import CacheManager, ManagerConfig
from session.words import GroupKind, GroupSpec, TransferStatus
from tests.core import audit

PAGE_TOKENS = 4
PAGE_BYTES = 64
MOST = 2**31 - 1
TIER = "redis"
DONE, MISSING, FAILED = TransferStatus.DONE, TransferStatus.MISSING, TransferStatus.FAILED
CORRUPT = TransferStatus.CORRUPT

FULL = GroupSpec("full", GroupKind.FULL, MOST, PAGE_BYTES)
WINDOW = GroupSpec("window", GroupKind.WINDOW, MOST, PAGE_BYTES, window_tokens=2 * PAGE_TOKENS + 1)
STATE = GroupSpec("state", GroupKind.STATE, MOST, PAGE_BYTES)
LAYOUTS = ((FULL,), (FULL, WINDOW), (FULL, STATE), (FULL, WINDOW, STATE), (WINDOW,), (STATE,))


def page_ids(names: Iterable[object]) -> bytes:
    """Chained as an engine chains them: each id is of its page and all before it."""
    chained, out = b"", b""
    for name in names:
        chained = sha256(chained + repr(name).encode()).digest()
        out += chained
    return out


def path(names: Iterable[object], salt: str = "") -> Path:
    return Path(salt=salt, page_ids=page_ids(names))


def token_path(tokens: Iterable[int], salt: str = "") -> Path:
    return Path(salt=salt, tokens=array("i", tokens).tobytes())


def ranges(groups: Sequence[GroupSpec], first: int, end: int) -> tuple[GroupRange, ...]:
    return tuple(GroupRange(number, first, end - first) for number in range(len(groups)))


class Stage:
    """A manager whose books are audited after each call, and the values that engines have written."""

    def __init__(self, **config: int) -> None:
        self.manager = CacheManager(ManagerConfig(**config), "epoch")  # type: ignore[arg-type]
        self.store: set[bytes] = set()
        self.now_ms = 1_000

    def settle(self) -> None:
        """The store does as it was told, and the books balance."""
        self.store.difference_update(self.manager.tiers.take_deletes())
        self.manager.tiers.take_touches()
        audit.check(self.manager)

    def tick(self, passed_ms: int = 0) -> None:
        self.now_ms += passed_ms
        self.manager.tick(self.now_ms)
        self.settle()

    def engine(
        self,
        *groups: GroupSpec,
        ranks: int = 1,
        fingerprint: bytes = b"f" * 32,
        tier: str = TIER,
        name: str = "engine",
    ) -> Engine:
        attach = Attach(name, fingerprint, "model", PAGE_TOKENS, groups or (FULL,), ranks, tier)
        return Engine(self, attach)


class Engine:
    """Asks as a client library would, and checks that what it may read has been written."""

    def __init__(self, stage: Stage, attach: Attach) -> None:
        self.stage, self.groups, self.ranks = stage, attach.groups, attach.num_ranks
        self.attached = stage.manager.attachments.attach(attach, stage.now_ms)
        stage.settle()

    @property
    def id(self) -> AttachmentId:
        return AttachmentId(self.attached.epoch, self.attached.attachment)

    def attachment(self) -> Attachment:
        return self.stage.manager.attachments.find(self.id, "call", self.stage.now_ms)

    def lookup(self, asked: Path, local: int = 0, lease: bool = True) -> Found:
        attachment = self.attachment()
        found = self.stage.manager.attachments.lookup(attachment, Lookup(asked, local, lease), self.stage.now_ms)
        self.stage.settle()
        return found

    def reserve(self, asked: Path, *wanted: GroupRange) -> Reserved:
        attachments = self.stage.manager.attachments
        reserved = attachments.reserve(self.attachment(), Reserve(asked, wanted), self.stage.now_ms)
        self.stage.settle()
        return reserved

    def names(self, pages: Iterable[TierPages], rank: int) -> list[bytes]:
        named = [(one.key_prefix, one.page_hashes) for one in pages]
        return [f"{prefix}{rank}:{page_hash.hex()}".encode() for prefix, hashes in named for page_hash in hashes]

    def write(self, reserved: Reserved, ranks: Iterable[int] | None = None, most: int = MOST) -> list[Committed]:
        """The first `most` pages of each group are written and committed on these ranks (None: all)."""
        answers = []
        for rank in range(self.ranks) if ranks is None else ranks:
            written = []
            for one in reserved.pages:
                count = min(most, len(one.pages))
                cut = one._replace(page_hashes=one.page_hashes[:count])
                self.stage.store.update(self.names([cut], rank))
                written.append(WrittenPages(one.group, count, count * self.groups[one.group].page_bytes))
            answers.append(self.commit(Commit(reserved.ticket, rank, DONE, tuple(written))))
        return answers

    def commit(self, said: Commit) -> Committed:
        committed = self.stage.manager.attachments.commit(self.attachment(), said, self.stage.now_ms)
        self.stage.settle()
        return committed

    def release(self, *ends: LeaseEnd) -> int:
        released = self.stage.manager.attachments.release(self.attachment(), ends, self.stage.now_ms)
        self.stage.settle()
        return released

    def save(self, asked: Path, first: int, end: int) -> Reserved:
        """Reserve these pages of all groups, write and commit them."""
        reserved = self.reserve(asked, *ranges(self.groups, first, end))
        if reserved.ticket:
            self.write(reserved)
        return reserved

    def is_written(self, found: Found) -> bool:
        return all(name in self.stage.store for rank in range(self.ranks) for name in self.names(found.pages, rank))


class Expected(NamedTuple):
    usable_pages: int
    matched_pages: int


def expected(groups: Sequence[GroupSpec], has: Callable[[int, int], bool], local: int, limit: int) -> Expected:
    """Where an engine may resume, by trying every boundary; `has(group, page)` says what the tier holds."""
    matched = limit
    for group, spec in enumerate(groups):
        if spec.kind is GroupKind.FULL:
            matched = min(matched, next((page for page in range(local, limit) if not has(group, page)), limit))
    able = [boundary for boundary in range(local, matched + 1) if _can_resume(groups, has, local, boundary)]
    return Expected(max(able), matched)


def _can_resume(groups: Sequence[GroupSpec], has: Callable[[int, int], bool], local: int, boundary: int) -> bool:
    return all(has(group, page) for group, page in needed(groups, local, boundary))


def needed(groups: Sequence[GroupSpec], local: int, boundary: int) -> set[tuple[int, int]]:
    """(group, page) of what an engine that can resume at `local` by itself reads to resume at `boundary`."""
    if boundary == local:
        return set()
    pages = set()
    for group, spec in enumerate(groups):
        first_token = local * PAGE_TOKENS
        if spec.kind is GroupKind.WINDOW:
            first_token = max(first_token, boundary * PAGE_TOKENS - (spec.window_tokens - 1))
        elif spec.kind is GroupKind.STATE:
            first_token = (boundary - 1) * PAGE_TOKENS
        pages |= {(group, page) for page in range(first_token // PAGE_TOKENS, boundary)}
    return pages
