"""A host tier that counts what each call moved.

The figures go to a callback, as values.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Literal, NamedTuple

from session.words import HostTierKind
from tier_client.errors import HostTierError
from worker_service.core.ports import HostTier

Operation = Literal["put", "get"]


class Measure(NamedTuple):
    """One call: the bytes of what was stored or found; `failed` when a HostTierError ended it."""

    operation: Operation
    num_bytes: int
    failed: bool = False


class MeteredTier:
    """A HostTier around another; `record` is called in the thread of the call, once for each, and must not block."""

    def __init__(self, inner: HostTier, record: Callable[[Measure], None]) -> None:
        self._inner = inner
        self._record = record

    @property
    def kind(self) -> HostTierKind:
        return self._inner.kind

    def identity(self) -> str:
        return self._inner.identity()

    def put(self, keys: Sequence[bytes], values: Sequence[Sequence[bytes | memoryview]]) -> int:
        with self._failures("put"):
            done = self._inner.put(keys, values)
        self._record(Measure("put", sum(memoryview(part).nbytes for value in values[:done] for part in value)))
        return done

    def get(self, keys: Sequence[bytes], max_bytes: int) -> list[bytearray | None]:
        with self._failures("get"):
            values = self._inner.get(keys, max_bytes)
        self._record(Measure("get", sum(len(value) for value in values if value is not None)))
        return values

    def put_parts(self, key: bytes, parts: Iterable[Sequence[bytes | memoryview]]) -> bool:
        num_bytes = 0

        def counted() -> Iterator[Sequence[bytes | memoryview]]:
            nonlocal num_bytes
            for part in parts:
                num_bytes += sum(memoryview(buffer).nbytes for buffer in part)
                yield part

        with self._failures("put"):
            is_stored = self._inner.put_parts(key, counted())
        self._record(Measure("put", num_bytes if is_stored else 0))
        return is_stored

    def get_parts(self, key: bytes, num_parts: int, max_bytes: int) -> Generator[bytearray | None, None, None]:
        num_bytes, failed = 0, False
        try:
            with closing(self._inner.get_parts(key, num_parts, max_bytes)) as parts:
                for part in parts:
                    num_bytes += len(part or b"")
                    yield part
        except HostTierError:
            failed = True
            raise
        finally:
            self._record(Measure("get", 0 if failed else num_bytes, failed))

    def note_needs(self, needs: Iterable[tuple[bytes, bytes]]) -> None:
        self._inner.note_needs(needs)

    @contextmanager
    def _failures(self, operation: Operation) -> Iterator[None]:
        """Records a call that fails, and lets its error pass."""
        try:
            yield
        except HostTierError:
            self._record(Measure(operation, 0, failed=True))
            raise

    def close(self) -> None:
        self._inner.close()
