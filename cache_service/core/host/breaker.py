"""A circuit breaker: stops asking a host tier that fails, and tries again after a pause."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Breaker:
    """Opens after consecutive failures; asks again after a pause."""

    failures_to_open: int
    pause_ms: int
    failures: int = 0
    open_until_ms: int | None = None
    is_trying: bool = False
    """It was open, the pause is over, and nothing has succeeded since."""

    def failed(self, now_ms: int) -> None:
        self.failures += 1
        if self.failures >= self.failures_to_open:
            self.open(now_ms)

    def open(self, now_ms: int) -> None:
        """Opens it for a pause, however few failures there were."""
        self.failures = max(self.failures, self.failures_to_open)
        self.open_until_ms, self.is_trying = now_ms + self.pause_ms, False

    def succeeded(self) -> None:
        self.failures, self.is_trying = 0, False
        self.open_until_ms = None

    def tick(self, now_ms: int) -> None:
        """After the pause one more failure opens it again."""
        if self.open_until_ms is not None and now_ms >= self.open_until_ms:
            self.open_until_ms, self.is_trying = None, True
            self.failures = self.failures_to_open - 1

    @property
    def is_open(self) -> bool:
        return self.open_until_ms is not None
