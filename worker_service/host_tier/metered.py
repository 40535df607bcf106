"""A host tier that measures what each call moved and how long it took.

The figures go to a callback, as values.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from typing import Literal, NamedTuple

from session.words import HostTierKind
from tier_client.errors import HostTierError
from worker_service.core.ports import HostTier

Operation = Literal["put", "get"]


class Measure(NamedTuple):
    """One call: `num_done` of `num_values` values were stored or found; `failed` when a HostTierError ended it."""

    operation: Operation
    num_values: int
    num_done: int
    num_bytes: int
    seconds: float
    failed: bool


class MeteredTier:
    """A HostTier around another; `record` is called in the thread of the call, once for each, and must not block."""

    def __init__(
        self, inner: HostTier, record: Callable[[Measure], None], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._inner = inner
        self._record = record
        self._clock = clock

    @property
    def kind(self) -> HostTierKind:
        return self._inner.kind

    def identity(self) -> str:
        return self._inner.identity()

    def put(self, keys: Sequence[bytes], values: Sequence[Sequence[bytes | memoryview]]) -> int:
        start = self._clock()
        try:
            done = self._inner.put(keys, values)
        except HostTierError:
            self._record(Measure("put", len(keys), 0, 0, self._clock() - start, failed=True))
            raise
        num_bytes = sum(memoryview(part).nbytes for value in values[:done] for part in value)
        self._record(Measure("put", len(keys), done, num_bytes, self._clock() - start, failed=False))
        return done

    def get(self, keys: Sequence[bytes], max_bytes: int) -> list[bytearray | None]:
        start = self._clock()
        try:
            values = self._inner.get(keys, max_bytes)
        except HostTierError:
            self._record(Measure("get", len(keys), 0, 0, self._clock() - start, failed=True))
            raise
        found = [len(value) for value in values if value is not None]
        self._record(Measure("get", len(keys), len(found), sum(found), self._clock() - start, failed=False))
        return values

    def put_parts(self, key: bytes, parts: Iterable[Sequence[bytes | memoryview]]) -> bool:
        start = self._clock()
        num_bytes = 0

        def counted() -> Iterator[Sequence[bytes | memoryview]]:
            nonlocal num_bytes
            for part in parts:
                num_bytes += sum(memoryview(buffer).nbytes for buffer in part)
                yield part

        try:
            is_stored = self._inner.put_parts(key, counted())
        except HostTierError:
            self._record(Measure("put", 1, 0, 0, self._clock() - start, failed=True))
            raise
        done = int(is_stored)
        self._record(Measure("put", 1, done, num_bytes * done, self._clock() - start, failed=False))
        return is_stored

    def get_parts(self, key: bytes, num_parts: int, max_bytes: int) -> Generator[bytearray | None, None, None]:
        start = self._clock()
        num_found = num_bytes = 0
        failed = False
        try:
            with closing(self._inner.get_parts(key, num_parts, max_bytes)) as parts:
                for part in parts:
                    num_found += part is not None
                    num_bytes += len(part or b"")
                    yield part
        except HostTierError:
            failed, num_bytes = True, 0
            raise
        finally:
            is_whole = num_found == num_parts and not failed
            self._record(Measure("get", 1, int(is_whole), num_bytes, self._clock() - start, failed))

    def close(self) -> None:
        self._inner.close()
