"""The shared host tier: values in a Redis that every worker reaches, over connections of this tier's own.

The callers' threads do the work. Control clients stay away from these connections: one that cancels a call half-way
would leave the rest of a value to be read as the next one's reply.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from session.protocol import MAX_SENTINEL_BYTES, SENTINEL_KEY
from session.redis_url import parse_redis_url
from session.words import HostTierKind
from tier_client.errors import HostTierError, TooLongReply
from tier_client.redis_parts import IN_FLIGHT, read_found, read_parts, read_stored, store_parts
from tier_client.resp import Buffer, RespConnection, encode_command

VALUES_PER_COMMAND = 8


@dataclass(frozen=True, slots=True)
class RedisTierConfig:
    num_connections: int = 4
    timeout_s: float = 2.0
    """For one command of up to eight values, or one part of a value; the wait for a connection included."""
    ttl_ms: int = 24 * 3600 * 1000
    """Values that are never deleted expire."""

    def __post_init__(self) -> None:
        if self.num_connections < 1:
            raise ValueError("num_connections: at least 1")
        if self.timeout_s <= 0:
            raise ValueError("timeout_s: must be positive")
        if self.ttl_ms < 1000:
            raise ValueError("ttl_ms: at least 1000")


class RedisTier:
    """A HostTier over Redis. Any number of threads may call it; each call holds one connection."""

    def __init__(self, url: str, config: RedisTierConfig | None = None) -> None:
        self._config = config or RedisTierConfig()
        self._address = parse_redis_url(url)
        self._ttl = b"%d" % self._config.ttl_ms
        self._free = threading.Semaphore(self._config.num_connections)
        self._lock = threading.Lock()
        self._idle: list[RespConnection] = []
        self._closed = False

    def __repr__(self) -> str:
        return f"RedisTier({self._address})"

    @property
    def kind(self) -> HostTierKind:
        return HostTierKind.SHARED

    def identity(self) -> str:
        with self._connection() as connection:
            # A full Redis refuses any SET, also one that would change nothing; what it has can be read all the same.
            value = connection.command(b"GET", SENTINEL_KEY)
            if value is None:
                # NX, then GET: of several workers that start at once, all learn the one value that won.
                connection.command(b"SET", SENTINEL_KEY, secrets.token_hex(16).encode(), b"NX")
                value = connection.command(b"GET", SENTINEL_KEY)
        if not value or len(value) > MAX_SENTINEL_BYTES:
            raise HostTierError("the sentinel key vanished or holds a foreign value")
        return value.decode("ascii", "replace")

    def put(self, keys: Sequence[bytes], values: Sequence[Sequence[bytes | memoryview]]) -> int:
        if len(keys) != len(values):
            raise ValueError(f"{len(keys)} keys for {len(values)} values")
        for first in range(0, len(keys), VALUES_PER_COMMAND):
            batch = slice(first, first + VALUES_PER_COMMAND)
            acknowledged = self._put_batch(keys[batch], values[batch])
            if acknowledged < len(keys[batch]):
                return first + acknowledged
        return len(keys)

    def get(self, keys: Sequence[bytes], max_bytes: int) -> list[bytearray | None]:
        values: list[bytearray | None] = []
        while len(values) < len(keys):
            values += self._get_batch(keys[len(values) : len(values) + VALUES_PER_COMMAND], max_bytes)
        return values

    def put_parts(self, key: bytes, parts: Iterable[Sequence[bytes | memoryview]]) -> bool:
        with self._connection() as connection:
            return store_parts(connection, key, parts, self._config.ttl_ms, self._rearm(connection))

    def get_parts(self, key: bytes, num_parts: int, max_bytes: int) -> Generator[bytearray | None, None, None]:
        try:
            with self._connection() as connection:
                yield from read_parts(connection, key, num_parts, max_bytes, self._rearm(connection))
        except TooLongReply:
            yield None

    def note_needs(self, needs: Iterable[tuple[bytes, bytes]]) -> None:
        """Nothing to note: the cache service decides what goes."""

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _put_batch(self, keys: Sequence[bytes], values: Sequence[Sequence[bytes | memoryview]]) -> int:
        buffers: list[Buffer] = []
        for key, value in zip(keys, values, strict=True):
            buffers += self._set_command(key, value)
        with self._connection() as connection:
            connection.send(buffers)
            stored = [read_stored(connection) for _ in keys]
        return stored.index(False) if False in stored else len(stored)

    def _set_command(self, key: bytes, value: Sequence[Buffer]) -> list[Buffer]:
        # The value comes last, so that Redis can read it straight into the string that it keeps.
        size = sum(memoryview(buffer).nbytes for buffer in value)
        head = b"*4\r\n$6\r\nPSETEX\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n$%d\r\n"
        return [head % (len(key), key, len(self._ttl), self._ttl, size), *value, b"\r\n"]

    def _get_batch(self, keys: Sequence[bytes], max_bytes: int) -> list[bytearray | None]:
        """Returns the leading values, at least one: a value that is too long ends the batch and its connection."""
        values: list[bytearray | None] = []
        try:
            with self._connection() as connection:
                _ask(connection, keys[:IN_FLIGHT])
                for following in range(IN_FLIGHT, len(keys) + IN_FLIGHT):
                    values.append(read_found(connection, max_bytes))
                    _ask(connection, keys[following : following + 1])
        except TooLongReply:
            values.append(None)
        return values

    def _rearm(self, connection: RespConnection) -> Callable[[], None]:
        return lambda: connection.arm(self._config.timeout_s)

    @contextmanager
    def _connection(self) -> Iterator[RespConnection]:
        """Yields one connection for one command; it is reused only if its replies were read whole."""
        deadline = time.monotonic() + self._config.timeout_s
        if not self._free.acquire(timeout=self._config.timeout_s):
            raise HostTierError("all connections are in use")
        try:
            connection = self._take(deadline - time.monotonic())
            connection.arm(deadline - time.monotonic())
            try:
                yield connection
            except BaseException:
                connection.close()
                raise
            self._give_back(connection)
        finally:
            self._free.release()

    def _take(self, timeout_s: float) -> RespConnection:
        with self._lock:
            if self._closed:
                raise HostTierError("the tier is closed")
            idle = [self._idle.pop()] if self._idle else []
        for connection in idle:
            if connection.is_clean():
                return connection
            connection.close()
        return RespConnection(self._address, timeout_s)

    def _give_back(self, connection: RespConnection) -> None:
        with self._lock:
            if not self._closed and connection.usable:
                self._idle.append(connection)
                return
        connection.close()


def _ask(connection: RespConnection, keys: Sequence[bytes]) -> None:
    connection.send([encode_command(b"GET", key) for key in keys])
