"""The private host tier: values in this process's own memory, the least recently used ones dropped first.

Of values that are put or read together the last ones are dropped first, and each before those that it needs: without a
prompt's first pages its others are no use. So of the prompt that was used least recently the deepest page goes first.
The cache service is not told: a page that was dropped is missing when it is asked for. The values end with the process.
"""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Generator, Iterable, Sequence

from session.words import HostTierKind
from tier_client.errors import HostTierError

# How many keys without a value keep their needs, 5 MB: those of transfers that wait, and of pages that found no room,
# through which the pages behind them need those before.
MAX_ABSENT = 16_384

# A value in parts is a tuple of them.
_Value = bytes | tuple[bytes, ...]


class MemoryTier:
    """A HostTier of at most `capacity_bytes`, keys not counted. A value larger than that is not acknowledged."""

    def __init__(self, capacity_bytes: int) -> None:
        if capacity_bytes < 0:
            raise ValueError("capacity_bytes: must not be negative")
        self._capacity_bytes = capacity_bytes
        self._num_bytes = 0
        self._values: OrderedDict[bytes, _Value] = OrderedDict()
        self._needs: dict[bytes, bytes] = {}
        self._identity = secrets.token_hex(16)
        self._lock = threading.Lock()
        self._closed = False

    @property
    def kind(self) -> HostTierKind:
        return HostTierKind.PRIVATE

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def identity(self) -> str:
        with self._lock:
            return self._identity

    def put(self, keys: Sequence[bytes], values: Sequence[Sequence[bytes | memoryview]]) -> int:
        if len(keys) != len(values):
            raise ValueError(f"{len(keys)} keys for {len(values)} values")
        with self._lock:
            self._check_open()
        sizes = (sum(memoryview(part).nbytes for part in parts) for parts in values)
        num_fit = next((number for number, size in enumerate(sizes) if size > self._capacity_bytes), len(keys))
        # Joined outside the lock: the copy is the work.
        self._keep(keys[:num_fit], [b"".join(parts) for parts in values[:num_fit]])
        return num_fit

    def get(self, keys: Sequence[bytes], max_bytes: int) -> list[bytearray | None]:
        found = self._find(keys)
        return [bytearray(value) if isinstance(value, bytes) and len(value) <= max_bytes else None for value in found]

    def put_parts(self, key: bytes, parts: Iterable[Sequence[bytes | memoryview]]) -> bool:
        stored: list[bytes] = []
        for buffers in parts:
            stored.append(b"".join(buffers))
            if sum(map(len, stored)) > self._capacity_bytes:
                return False
        self._keep([key], [tuple(stored)])
        return True

    def get_parts(self, key: bytes, num_parts: int, max_bytes: int) -> Generator[bytearray | None, None, None]:
        (found,) = self._find([key])
        parts = found if isinstance(found, tuple) else ()
        for number in range(num_parts):
            if number >= len(parts) or len(parts[number]) > max_bytes:
                yield None
                return
            yield bytearray(parts[number])

    def note_needs(self, needs: Iterable[tuple[bytes, bytes]]) -> None:
        with self._lock:
            if len(self._needs) > len(self._values) + MAX_ABSENT:
                self._needs = {key: need for key, need in self._needs.items() if key in self._values}
            self._needs.update(needs)

    def flush(self) -> None:
        """Drops all values; the store has a new identity from now on."""
        with self._lock:
            self._clear()
            self._identity = secrets.token_hex(16)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._clear()

    def _clear(self) -> None:
        self._values.clear()
        self._needs.clear()
        self._num_bytes = 0

    def _find(self, keys: Sequence[bytes]) -> list[_Value | None]:
        with self._lock:
            self._check_open()
            self._use(keys)
            return [self._values.get(key) for key in keys]

    def _keep(self, keys: Sequence[bytes], values: Sequence[_Value]) -> None:
        """Keeps all of them, then drops what was used least recently, until the rest fits. These may be the last of
        them, where all else is what they need."""
        with self._lock:
            self._check_open()
            for key, value in zip(keys, values, strict=True):
                self._num_bytes += _size(value) - _size(self._values.pop(key, b""))
                self._values[key] = value
            self._use(keys)
            while self._num_bytes > self._capacity_bytes:
                self._num_bytes -= _size(self._values.popitem(last=False)[1])

    def _use(self, keys: Sequence[bytes]) -> None:
        """Notes that these were used now. The order, least recently used first, ends with the last of them, ..., the
        first of them, the page before it, ..., the prompt's first page: 1,000 pages take 0.1 ms.
        """
        for key in reversed(keys):
            if key in self._values:
                self._values.move_to_end(key)
        need = self._needs.get(keys[0]) if keys else None
        for _ in range(len(self._needs)):
            if need is None:
                return
            if need in self._values:
                self._values.move_to_end(need)
            need = self._needs.get(need)

    def _check_open(self) -> None:
        if self._closed:
            raise HostTierError("the tier is closed")


def _size(value: _Value) -> int:
    return len(value) if isinstance(value, bytes) else sum(map(len, value))
