"""The shared host tier's keys, in the background: the scan after a restart, the sentinel's watch, deletes and touches.

Never reads or writes a value, and decides nothing: which keys go and what a lost store means is the manager's to say.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ClusterDownError, OutOfMemoryError, ResponseError, TryAgainError

from cache_service.clear_marks import FAILURES, ClearMarks
from cache_service.core.cache_manager import CacheManager
from cache_service.core.host.host_key import scan_prefix
from cache_service.key_changes import ChangeLimits, KeyChanges
from cache_service.key_scan import RefusedScans, Scan, find_keys, with_ends_ms
from session.protocol import MAX_SENTINEL_BYTES, SENTINEL_KEY

ADOPTED_AT_ONCE = 512

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HostKeysConfig:
    ttl_ms: int = 86_400_000
    watch_interval_s: float = 0.2
    timeout_s: float = 0.3
    """Of one command. With three failures to open it, the breaker opens within a second of a stall."""
    max_queued_keys: int = 65_536
    keys_per_command: int = 256
    scan_pause_s: float = 0.002
    refused_pause_s: float = 1.0
    """Before a scan that Redis refused is made again; up to a minute where it goes on refusing."""

    def change_limits(self) -> ChangeLimits:
        return ChangeLimits(self.ttl_ms, self.max_queued_keys, self.keys_per_command, self.watch_interval_s)


class InvalidRedisUrl(ValueError):
    """The URL cannot be used. The message does not quote it: it may hold a password."""


def open_client(url: str, timeout_s: float) -> Redis:
    """Returns a client that fails at once instead of trying again: the watch tries again soon enough."""
    try:
        client: Redis = Redis.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
            max_connections=8,
        )
    except (ValueError, TypeError):
        raise InvalidRedisUrl("not of the form redis://user:password@host:port/db") from None
    return client


class RedisHostKeys:
    """Owned by the event loop, as the rows are. `delete` and `touch` only queue; three tasks do the work."""

    def __init__(
        self,
        client: Redis,
        manager: CacheManager,
        config: HostKeysConfig | None = None,
        clock: Callable[[], int] = lambda: time.monotonic_ns() // 1_000_000,
    ) -> None:
        self._client: Any = client  # redis-py's reply types differ between its releases
        self._manager = manager
        self._config = config or HostKeysConfig()
        self._clock = clock
        self._scanned: set[Scan] = set()
        self._finished: set[Scan] = set()
        self._refused = RefusedScans(int(self._config.refused_pause_s * 1000))
        self._foreign: set[str] = set()
        self._marks = ClearMarks(client, self._config.ttl_ms)
        self._changes = KeyChanges(client, self._config.change_limits(), clock)
        self._seen = ""
        self._sentinel: bytes | None = None  # at the last look, a foreign value too
        self._scan_reason = ""  # why the last scan failed
        self._failing = False
        self._closing = False
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        turns = (self._watch, self._scan, self._changes.send)
        self._tasks = [asyncio.create_task(self._for_ever(turn)) for turn in turns]

    async def _for_ever(self, turn: Callable[[], Awaitable[None]]) -> None:
        """Runs a turn again and again. A fault must not end the task: without the watch no flush would be noticed
        again."""
        while not self._closing:
            try:
                await turn()
            except Exception:
                log.exception("host keys: a background task failed and goes on")
                await asyncio.sleep(self._config.watch_interval_s)

    async def close(self) -> None:
        # The client may swallow a cancellation that meets the end of a command; then this ends the task.
        self._closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.aclose()

    def delete(self, keys: Sequence[bytes]) -> None:
        self._changes.delete(keys)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Queues keys whose time to live is to be refreshed, in this order."""
        self._changes.touch(keys)

    async def clear_begins(self) -> None:
        """Marks a Clear call, before rows are forgotten: until their keys are deleted a restarted service adopts
        none."""
        await self._marks.begin(fingerprint for _, fingerprint in self._manager.tiers.named())

    def clear_ends(self, *, keep_marks: bool) -> None:
        """Ends a Clear call. Its marks stay, too, where rows of before are yet to be found: this process hides what a
        scan finds later, the next one would not."""
        mine = (Scan(*named) for named in self._manager.tiers.named())
        knows_all = all(scan in self._finished for scan in mine if scan.host_tier_id not in self._foreign)
        self._marks.end(keep=keep_marks or not knows_all)

    @property
    def has_room(self) -> bool:
        """Returns whether thousands of keys can be queued without loss."""
        return self._changes.has_room

    @property
    def num_dropped(self) -> int:
        """Returns how many keys found the queue full; they end by their time to live."""
        return self._changes.num_dropped

    # The sentinel

    async def _watch(self) -> None:
        started = time.monotonic()
        try:
            await self._look_at_sentinel()
            self._report(ok=True)
        except FAILURES as error:
            self._report(ok=False, reason=str(error))
        await asyncio.sleep(max(0.0, self._config.watch_interval_s - (time.monotonic() - started)))

    async def _look_at_sentinel(self) -> None:
        """Looks at the sentinel key: Redis was flushed or replaced when it is gone, or another than before."""
        value = await self._client.get(SENTINEL_KEY)
        found = _identity_in(value)
        if value != self._sentinel:
            if self._seen and found != self._seen:
                self._lose(self._seen)
            if value is not None and not found:
                log.warning(
                    "the sentinel key holds a foreign value, so no worker learns which store this is: delete the key",
                    extra={"key": SENTINEL_KEY.decode(), "num_bytes": len(value)},
                )
        self._sentinel, self._seen = value, found or self._seen
        if value is None and self._seen:
            await self._put_name_back()
        self._warn_of_foreign({tier for tier, _ in self._manager.tiers.named()} - {self._seen})

    async def _put_name_back(self) -> None:
        """Connected workers go on naming the store as they did in their Hello."""
        try:
            await self._client.set(SENTINEL_KEY, self._seen, nx=True)
        except OutOfMemoryError:
            return  # full, not away: the next look finds no name again
        self._sentinel = self._seen.encode()  # a flush before the next look shows too

    def _lose(self, host_tier_id: str) -> None:
        log.warning("the host tier was flushed or replaced; its index is dropped", extra={"host_tier": host_tier_id})
        self._manager.host_lost(host_tier_id)
        self._scanned = {scan for scan in self._scanned if scan.host_tier_id != host_tier_id}
        self._finished &= self._scanned
        self._refused.lost(host_tier_id)

    def _warn_of_foreign(self, tiers: set[str]) -> None:
        for tier in sorted(tiers - self._foreign):
            log.warning("a worker's host tier is not the Redis of this service", extra={"host_tier": tier})
        self._foreign = tiers

    def _report(self, ok: bool, reason: str = "") -> None:
        """Reports each failure, and health only after a failure: a ping that works proves nothing about large
        values."""
        if ok and not self._failing:
            return
        if ok == self._failing:
            log.log(
                logging.INFO if ok else logging.WARNING,
                "the host tier answers again" if ok else "the host tier does not answer",
                extra={"reason": reason},
            )
        self._failing = not ok
        for tier in sorted({tier for tier, _ in self._manager.tiers.named()} - self._foreign):
            if ok:
                self._manager.tiers.report_ok(tier)
            else:
                self._manager.tiers.report_failure(tier, self._clock())

    # The scan

    async def _scan(self) -> None:
        """Adopts the rows of each fingerprint once, a little at a time.

        Those first that have most time to live: they were used last, and of one prompt heads were touched after tails.
        In the random order of SCAN the quota would cut prefixes in the middle.
        """
        for scan in (Scan(*named) for named in self._manager.tiers.named()):
            is_due = scan not in self._scanned or self._refused.is_due(scan, self._clock())
            if scan.host_tier_id == self._seen and is_due:
                await self._adopt_rows(scan)
            elif scan.host_tier_id in self._foreign:
                self._manager.tiers.end_scan(*scan)
        if not self._changes.deletes and not self._manager.tiers.num_deletes():
            await self._marks.remove()
        await asyncio.sleep(self._config.watch_interval_s)

    async def _adopt_rows(self, scan: Scan) -> None:
        """Scans once. Whatever goes wrong, nobody waits for ever: a scan that can succeed soon is made again, any other
        one has ended. One that Redis refuses is made again all the same, and nobody waits for it."""
        self._scanned.add(scan)
        try:
            found = await self._find_rows(scan)
            if self._refused.allowed(scan):
                log.info("Redis allows the scan for host rows now", extra={"host_tier": scan.host_tier_id})
            if not self._refused:
                self._scan_reason = ""
            if not await self._add_rows(scan, found):
                return
            self._finished.add(scan)
        except FAILURES as error:
            self._warn_of_scan(error)
            if _may_pass(error):
                self._scanned.discard(scan)
                return
            self._refused.add(scan, self._clock())
        except Exception:
            log.exception("host keys: a scan failed; rows that it has not added are not counted")
            self._refused.failed(scan)
        self._manager.tiers.end_scan(*scan)

    async def _find_rows(self, scan: Scan) -> list[bytes]:
        """Returns the keys to adopt, those first that have most time to live; none after an unfinished Clear call."""
        if await self._marks.is_left(scan.fingerprint):
            await self._delete_rows(scan)
            return []
        found: list[tuple[int, bytes]] = []
        async for keys in self._keys_of(scan.fingerprint):
            found += await with_ends_ms(self._client, keys)
        await asyncio.to_thread(found.sort, reverse=True)
        if found:
            self._changes.follow(await self._client.pttl(found[0][1]))
        return [key for _, key in found]

    async def _add_rows(self, scan: Scan, found: Sequence[bytes]) -> bool:
        """Returns False where the store was lost meanwhile: these keys may be of before, and are scanned for anew."""
        num_adopted = 0
        for at in range(0, len(found), ADOPTED_AT_ONCE):
            if scan not in self._scanned:
                return False
            num_adopted += self._manager.tiers.add_scanned(*scan, found[at : at + ADOPTED_AT_ONCE])
            await asyncio.sleep(self._config.scan_pause_s)
        log.info("host rows adopted", extra={"host_tier": scan.host_tier_id, "num_pages": num_adopted})
        return True

    def _warn_of_scan(self, error: Exception) -> None:
        """Warns of each reason once, not at each of the attempts that follow."""
        reason, self._scan_reason = self._scan_reason, str(error)
        if reason == self._scan_reason:
            return
        log.warning(
            "the scan for host rows failed; it is made again"
            if _may_pass(error)
            else "Redis refuses the scan for host rows, which is tried again: those from before this start are "
            "neither found nor counted",
            extra={"reason": self._scan_reason},
        )

    async def _delete_rows(self, scan: Scan) -> None:
        """Deletes the rows of a Clear call that an earlier service did not finish, but nothing written since."""
        async for keys in self._keys_of(scan.fingerprint):
            if older := self._manager.tiers.unknown_of(scan.host_tier_id, keys):
                await self._client.unlink(*older)
        await self._marks.drop(scan.fingerprint)
        log.info("rows of an unfinished Clear call deleted")

    def _keys_of(self, fingerprint: bytes) -> AsyncIterator[list[bytes]]:
        return find_keys(self._client, scan_prefix(fingerprint), self._config.scan_pause_s)


def _identity_in(value: bytes | None) -> str:
    """Returns the store's identity; "" for a value that workers do not take for one."""
    return value.decode("ascii", "replace") if value and len(value) <= MAX_SENTINEL_BYTES else ""


def _may_pass(error: Exception) -> bool:
    """Returns whether a later attempt can succeed: not where Redis answers that it will not do this."""
    if isinstance(error, ResponseError):
        return isinstance(error, ClusterDownError | TryAgainError) or str(error).startswith("BUSY")
    return True
