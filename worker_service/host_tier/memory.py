"""The private host tier: values in this process's own memory, the least recently used ones dropped first.

Of values that are put or read together the last ones are dropped first: without a prompt's first pages its others are
no use. The values end with the process.
"""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Generator, Iterable, Sequence

from session.words import HostTierKind
from tier_client.errors import HostTierError

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
        for number in reversed(range(num_fit)):
            self._keep(keys[number], b"".join(values[number]))  # joined outside the lock: the copy is the work
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
        return self._keep(key, tuple(stored))

    def get_parts(self, key: bytes, num_parts: int, max_bytes: int) -> Generator[bytearray | None, None, None]:
        (found,) = self._find([key])
        parts = found if isinstance(found, tuple) else ()
        for number in range(num_parts):
            if number >= len(parts) or len(parts[number]) > max_bytes:
                yield None
                return
            yield bytearray(parts[number])

    def flush(self) -> None:
        """Drops all values; the store has a new identity from now on."""
        with self._lock:
            self._values.clear()
            self._num_bytes = 0
            self._identity = secrets.token_hex(16)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._values.clear()
            self._num_bytes = 0

    def _find(self, keys: Sequence[bytes]) -> list[_Value | None]:
        with self._lock:
            self._check_open()
            for key in reversed(keys):
                if key in self._values:
                    self._values.move_to_end(key)
            return [self._values.get(key) for key in keys]

    def _keep(self, key: bytes, value: _Value) -> bool:
        with self._lock:
            self._check_open()
            if _size(value) > self._capacity_bytes:
                return False
            self._num_bytes += _size(value) - _size(self._values.pop(key, b""))
            self._values[key] = value
            while self._num_bytes > self._capacity_bytes:
                self._num_bytes -= _size(self._values.popitem(last=False)[1])
            return True

    def _check_open(self) -> None:
        if self._closed:
            raise HostTierError("the tier is closed")


def _size(value: _Value) -> int:
    return len(value) if isinstance(value, bytes) else sum(map(len, value))
