"""The ports of the worker's core as Protocols: the cache service, the mover of pages, the host tier.

Knows no protobuf, no Redis and no tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from collections.abc import Sequence as Seq
from typing import Protocol

from session.messages import Forget, Step, StepReply, Welcome
from session.words import HostTierKind, Transfer


class CachePort(Protocol):
    """The engine's view of the cache service. One unanswered Step at a time.

    A lost stream raises SessionLost from `step`, and once from `next_order`, so that an idle engine hears of it too.
    The engine then calls `disconnect`, drains the mover, calls `connect` and follows the Welcome.
    """

    async def connect(self, generation: int) -> Welcome:
        """Returns the Welcome to a Hello that names `generation`, the state to go on from; 0 begins anew.

        Raises SessionRefused when no cache service will take this worker.
        """
        ...

    async def step(self, step: Step) -> StepReply: ...

    async def next_order(self) -> Transfer | Forget:
        """Returns the next order of the present stream, to spill or to forget; waits for one."""
        ...

    async def disconnect(self) -> None:
        """Ends the stream. No order of it is returned afterwards."""
        ...

    async def close(self) -> None:
        """Says Goodbye and ends the stream."""
        ...


class Mover(Protocol):
    """Every transfer ends in exactly one ack, handed over in the event loop."""

    def fetch(self, transfer: Transfer, barrier: Callable[[], None]) -> None: ...

    def spill(self, transfer: Transfer) -> None: ...

    async def drain(self) -> None: ...

    async def close(self) -> None: ...


class HostTier(Protocol):
    """Values by key, beyond this process or in it. Called from the mover's threads, never from the event loop.

    Values are framed by page_codec before they come here. Every failure is a HostTierError; an absent key is a None,
    never an error.
    """

    @property
    def kind(self) -> HostTierKind: ...

    def identity(self) -> str:
        """Returns the sentinel's value, made on first use; it changes when the store was flushed."""
        ...

    def put(self, keys: Seq[bytes], values: Seq[Seq[bytes | memoryview]]) -> int:
        """Stores each value, given as buffers. Returns how many leading ones were stored: fewer in a full store."""
        ...

    def get(self, keys: Seq[bytes], max_bytes: int) -> list[bytearray | None]:
        """Returns the values in order, None for absent keys; a value longer than `max_bytes` counts as absent."""
        ...

    def put_parts(self, key: bytes, parts: Iterable[Seq[bytes | memoryview]]) -> bool:
        """Stores a value part by part, each given as buffers, as the iterable makes it.

        A part may be overwritten when the next one is asked for. The value is found once its last part is stored.
        Returns False in a full store.
        """
        ...

    def get_parts(self, key: bytes, num_parts: int, max_bytes: int) -> Generator[bytearray | None, None, None]:
        """Yields the first `num_parts` parts of a value that was stored so, read as they are taken.

        Ends with a None at the first part that is absent or longer than `max_bytes`. Close it to stop early.
        """
        ...

    def note_needs(self, needs: Iterable[tuple[bytes, bytes]]) -> None:
        """Notes pairs of keys (dependent, parent): the dependent's value cannot be used without the parent's.

        For a PRIVATE store, which evicts values by itself: it evicts the dependent before its parent. Raises nothing,
        and is called in the event loop: no copy is made meanwhile.
        """
        ...

    def close(self) -> None: ...
