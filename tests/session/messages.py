"""Good messages for tests to send or to spoil."""

from __future__ import annotations

import struct
import zlib
from array import array
from collections.abc import Iterable
from typing import Any

from protos.v1 import cache_pb2, types_pb2

PAGE = 16
MODEL = "model-digest"
MANY_PAGES = 64


def sealed(**message: Any) -> cache_pb2.SessionRequest:
    """A worker's message in its envelope."""
    body = cache_pb2.WorkerMessage(**message).SerializeToString()
    return cache_pb2.SessionRequest(body=body, crc32=zlib.crc32(body))


def over_the_wire(message: Any) -> Any:
    """Returns it as its reader gets it."""
    return type(message).FromString(message.SerializeToString())


def tokens(count: int, first: int = 1) -> bytes:
    return array("i", range(first, first + count)).tobytes()


def u64(values: Iterable[int]) -> bytes:
    numbers = tuple(values)
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def u32(values: Iterable[int]) -> bytes:
    numbers = tuple(values)
    return struct.pack(f"<{len(numbers)}I", *numbers)


def namespace(salt: str = "") -> types_pb2.Namespace:
    return types_pb2.Namespace(model=MODEL, salt=salt)


def full_group(num_pages: int = MANY_PAGES) -> types_pb2.GroupSpec:
    return types_pb2.GroupSpec(name="full", kind=types_pb2.GROUP_KIND_FULL, num_pages=num_pages, page_bytes=PAGE * 1024)


def mixed_groups(num_pages: int) -> list[types_pb2.GroupSpec]:
    """A model that needs all three kinds."""
    window = types_pb2.GroupSpec(
        name="window",
        kind=types_pb2.GROUP_KIND_WINDOW,
        num_pages=num_pages,
        window_tokens=PAGE + 4,
        page_bytes=PAGE * 64,
    )
    state = types_pb2.GroupSpec(name="state", kind=types_pb2.GROUP_KIND_STATE, num_pages=num_pages, page_bytes=512)
    return [full_group(num_pages), window, state]


def hybrid_hello(num_pages: int = 24) -> cache_pb2.Hello:
    """A worker of such a model, with a shared host tier."""
    message = hello(num_pages=num_pages)
    message.ClearField("groups")
    message.groups.extend(mixed_groups(num_pages))
    message.host_tier, message.host_tier_id = cache_pb2.HOST_TIER_KIND_SHARED, "tier"
    return message


def hello(worker_id: str = "w1", incarnation: str = "first", num_pages: int = MANY_PAGES) -> cache_pb2.Hello:
    return cache_pb2.Hello(
        protocol_version=2,
        worker_id=worker_id,
        endpoint="127.0.0.1:7500",
        incarnation=incarnation,
        fingerprint=bytes(range(32)),
        page_tokens=PAGE,
        groups=[full_group(num_pages)],
        host_tier=cache_pb2.HOST_TIER_KIND_NONE,
        num_ranks=1,
        model=MODEL,
    )


def acquire(sequence_id: int, prompt: bytes, salt: str = "") -> cache_pb2.Acquire:
    return cache_pb2.Acquire(
        sequence_id=sequence_id, namespace=namespace(salt), tokens=prompt, chunk_tokens=len(prompt) // 4
    )


def publish(sequence_id: int, computed_tokens: int, new_tokens: bytes = b"") -> cache_pb2.Publish:
    return cache_pb2.Publish(sequence_id=sequence_id, tokens=new_tokens, computed_tokens=computed_tokens)


def release(sequence_id: int) -> cache_pb2.Release:
    return cache_pb2.Release(sequence_id=sequence_id, reason=cache_pb2.RELEASE_REASON_FINISHED)


def full_step() -> cache_pb2.Step:
    """One of everything, well-formed."""
    return cache_pb2.Step(
        step_id=1,
        acks=[cache_pb2.Ack(ticket=1, num_done=1, status=cache_pb2.TRANSFER_STATUS_DONE, num_bytes=9, seconds=0.5)],
        publishes=[publish(7, 16, tokens(16))],
        releases=[release(8)],
        extends=cache_pb2.Extends(sequence_ids=u64([7, 9]), num_tokens=u32([20, 40])),
        adopts=[full_adopt()],
        acquires=[acquire(10, tokens(40))],
        rates=cache_pb2.Rates(prefill_tokens_per_s=100.0, fetch_bytes_per_s=1e9, spill_bytes_per_s=2e9),
        inventory=cache_pb2.Inventory(runs=[full_run()], is_complete=True),
        forgotten=2,
        shrinks=cache_pb2.Shrinks(sequence_ids=u64([7, 9]), num_tokens=u32([24, 48])),
    )


def full_run() -> cache_pb2.CachedRun:
    return cache_pb2.CachedRun(run=1, namespace=namespace(), tokens=tokens(2 * PAGE), page_ids=[u32([11, 12])])


def full_adopt() -> cache_pb2.Adopt:
    return cache_pb2.Adopt(
        sequence_id=5,
        namespace=namespace(),
        tokens=tokens(20),
        computed_tokens=18,
        tables=[types_pb2.GroupPages(group=0, first_page=0, page_ids=u32([3, 4]))],
        working=[types_pb2.SnapshotSlot(group=1, boundary_tokens=0, slot=2)],
        rolling=[types_pb2.SnapshotSlot(group=1, boundary_tokens=16, slot=3)],
        priority=-1,
    )
