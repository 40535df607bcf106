"""A host tier that fails on purpose, by a seeded plan. Calls from one thread meet the same faults in every run."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass

from session.words import HostTierKind
from tier_client.errors import HostTierError
from worker_service.core.ports import HostTier


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Probabilities: of a call to fail, be late or store a part only; of a value to vanish or come back changed."""

    seed: int = 0
    fail: float = 0.0
    delay: float = 0.0
    delay_s: float = 0.05
    partial: float = 0.0
    lose: float = 0.0
    corrupt: float = 0.0


class FaultyTier:
    """A HostTier around another. With the default plan it does nothing but pass on."""

    def __init__(
        self, inner: HostTier, plan: FaultPlan | None = None, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.plan = plan or FaultPlan()
        self._inner = inner
        self._sleep = sleep
        self._random = random.Random(self.plan.seed)
        self._lock = threading.Lock()
        self.num_calls = 0

    @property
    def kind(self) -> HostTierKind:
        return self._inner.kind

    def identity(self) -> str:
        self._disturb()
        return self._inner.identity()

    def put(self, keys: Sequence[bytes], values: Sequence[Sequence[bytes | memoryview]]) -> int:
        self._disturb()
        count = self._below(len(keys)) if keys and self._happens(self.plan.partial) else len(keys)
        return self._inner.put(keys[:count], values[:count])

    def get(self, keys: Sequence[bytes], max_bytes: int) -> list[bytearray | None]:
        self._disturb()
        values = self._inner.get(keys, max_bytes)
        return [self._spoil(value) for value in values]

    def put_parts(self, key: bytes, parts: Iterable[Sequence[bytes | memoryview]]) -> bool:
        """A store that fails does so between two parts; one that is full, too."""

        def disturbed() -> Iterator[Sequence[bytes | memoryview]]:
            for part in parts:
                self._disturb()
                yield part

        if self._happens(self.plan.partial):
            return False
        return self._inner.put_parts(key, disturbed())

    def get_parts(self, key: bytes, num_parts: int, max_bytes: int) -> Generator[bytearray | None, None, None]:
        for part in self._inner.get_parts(key, num_parts, max_bytes):
            self._disturb()
            spoilt = self._spoil(part)
            yield spoilt
            if spoilt is None:
                return

    def note_needs(self, needs: Iterable[tuple[bytes, bytes]]) -> None:
        self._inner.note_needs(needs)

    def close(self) -> None:
        self._inner.close()

    def _disturb(self) -> None:
        self.num_calls += 1
        if self._happens(self.plan.delay):
            self._sleep(self.plan.delay_s)
        if self._happens(self.plan.fail):
            raise HostTierError("a planned fault")

    def _spoil(self, value: bytearray | None) -> bytearray | None:
        if value is None or self._happens(self.plan.lose):
            return None
        if value and self._happens(self.plan.corrupt):
            value[self._below(len(value))] ^= 1 << self._below(8)
        return value

    def _happens(self, probability: float) -> bool:
        # No draw for what is not planned: adding one kind of fault leaves the others where they were.
        if not probability:
            return False
        with self._lock:
            return self._random.random() < probability

    def _below(self, limit: int) -> int:
        with self._lock:
            return self._random.randrange(limit)
