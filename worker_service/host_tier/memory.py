"""The private host tier: values in this process's own memory, the least recently used ones dropped first.

The values end with the process.
"""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Sequence

from session.words import HostTierKind
from worker_service.core.errors import HostTierError


class MemoryTier:
    """A HostTier of at most `capacity_bytes`, keys not counted. A value larger than that is not acknowledged."""

    def __init__(self, capacity_bytes: int) -> None:
        if capacity_bytes < 0:
            raise ValueError("capacity_bytes: must not be negative")
        self._capacity_bytes = capacity_bytes
        self._num_bytes = 0
        self._values: OrderedDict[bytes, bytes] = OrderedDict()
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
        for stored, (key, parts) in enumerate(zip(keys, values, strict=True)):
            value = b"".join(parts)  # outside the lock: the copy is the work
            if not self._keep(key, value):
                return stored
        return len(keys)

    def get(self, keys: Sequence[bytes], max_bytes: int) -> list[bytearray | None]:
        with self._lock:
            self._check_open()
            found = [self._values.get(key) for key in keys]
            for key, value in zip(keys, found, strict=True):
                if value is not None:
                    self._values.move_to_end(key)
        return [None if value is None or len(value) > max_bytes else bytearray(value) for value in found]

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

    def _keep(self, key: bytes, value: bytes) -> bool:
        with self._lock:
            self._check_open()
            if len(value) > self._capacity_bytes:
                return False
            self._num_bytes += len(value) - len(self._values.pop(key, b""))
            self._values[key] = value
            while self._num_bytes > self._capacity_bytes:
                self._num_bytes -= len(self._values.popitem(last=False)[1])
            return True

    def _check_open(self) -> None:
        if self._closed:
            raise HostTierError("the tier is closed")
