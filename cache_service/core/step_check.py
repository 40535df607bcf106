"""Everything that can be wrong with what a worker says, checked before anything is applied. Reads only.

A field's place in the Step is part of its name: "step.acquires[0].tokens".
"""

from __future__ import annotations

from cache_service.core.device_cache import DeviceCache
from cache_service.core.errors import (
    DuplicateSequence,
    InvalidInput,
    TooMany,
    UnknownSequence,
    UnknownTicket,
)
from cache_service.core.lease_table import Lease
from cache_service.core.types import (
    TOKEN_BYTES,
    Ack,
    Acquire,
    Extend,
    GroupKind,
    Hello,
    HostTierKind,
    Publish,
    SequenceId,
    Step,
)

MAX_GROUPS = 32
MAX_PAGE_TOKENS = 65_536
MAX_PAGES = 2**32 - 1
MAX_SEQUENCE_ID = 2**64 - 1


def check_hello(hello: Hello) -> None:
    for name in ("worker_id", "incarnation", "fingerprint"):
        if not getattr(hello, name):
            raise InvalidInput(f"hello.{name}", "is empty")
    if not 1 <= hello.page_tokens <= MAX_PAGE_TOKENS:
        raise InvalidInput("hello.page_tokens", f"{hello.page_tokens} is not in 1..{MAX_PAGE_TOKENS}")
    if hello.num_ranks < 1:
        raise InvalidInput("hello.num_ranks", "must be at least 1")
    if hello.host_tier is HostTierKind.SHARED and not hello.host_tier_id:
        raise InvalidInput("hello.host_tier_id", "a shared host tier needs its identity")
    if len(set(hello.live_sequences)) != len(hello.live_sequences):
        raise InvalidInput("hello.live_sequences", "names a sequence twice")
    _check_groups(hello)


def _check_groups(hello: Hello) -> None:
    if not 1 <= len(hello.groups) <= MAX_GROUPS:
        raise InvalidInput("hello.groups", f"{len(hello.groups)} groups; 1..{MAX_GROUPS} are allowed")
    names = set()
    for number, spec in enumerate(hello.groups):
        where = f"hello.groups[{number}]"
        if not spec.name or spec.name in names:
            raise InvalidInput(f"{where}.name", "is empty or taken")
        names.add(spec.name)
        if not 1 <= spec.num_pages <= MAX_PAGES:
            raise InvalidInput(f"{where}.num_pages", f"{spec.num_pages} is not in 1..{MAX_PAGES}")
        if spec.page_bytes < 0:
            raise InvalidInput(f"{where}.page_bytes", "must not be negative")
        if (spec.window_tokens >= 1) != (spec.kind == GroupKind.WINDOW) or spec.window_tokens < 0:
            raise InvalidInput(f"{where}.window_tokens", "is for WINDOW groups, which need at least 1")


def check_tokens(tokens: bytes, where: str, most: int) -> int:
    """How many tokens the packed bytes hold."""
    if not tokens:
        raise InvalidInput(where, "is empty")
    count, rest = divmod(len(tokens), TOKEN_BYTES)
    if rest:
        raise InvalidInput(where, f"{len(tokens)} bytes are no whole number of int32 tokens")
    if count > most:
        raise InvalidInput(where, f"{count} tokens; at most {most} are allowed")
    return count


def check_step(cache: DeviceCache, step: Step) -> None:
    """Raises before anything changed; what passes can be applied to the end."""
    for number, ack in enumerate(step.acks):
        check_ack(cache, ack, f"step.acks[{number}]")
    seen: set[SequenceId] = set()
    for number, publish in enumerate(step.publishes):
        where = f"step.publishes[{number}]"
        _check_once(publish.sequence_id, seen, where)
        check_publish(cache, publish, where)
    released: set[SequenceId] = set()
    for number, release in enumerate(step.releases):
        where = f"step.releases[{number}]"
        _check_once(release.sequence_id, released, where)
        known_lease(cache, release.sequence_id, where)
    seen = set()
    for number, extend in enumerate(step.extends):
        where = f"step.extends[{number}]"
        _check_once(extend.sequence_id, seen, where)
        if extend.sequence_id in released:
            raise InvalidInput(f"{where}.sequence_id", "is released by the same step")
        check_extend(cache, extend, where)
    _check_acquires(cache, step, released)


def _check_acquires(cache: DeviceCache, step: Step, released: set[SequenceId]) -> None:
    seen: set[SequenceId] = set()
    for number, acquire in enumerate(step.acquires):
        where = f"step.acquires[{number}]"
        if acquire.sequence_id in seen:
            raise DuplicateSequence(f"{where}.sequence_id", f"{acquire.sequence_id} is named twice")
        seen.add(acquire.sequence_id)
        check_acquire(cache, acquire, where, acquire.sequence_id in released)
    if step.acquires:
        live = len(cache.leases) - len(released) + len(step.acquires)
        _check_live(cache, live, f"step.acquires[{len(step.acquires) - 1}]")


def _check_once(sequence_id: SequenceId, seen: set[SequenceId], where: str) -> None:
    if sequence_id in seen:
        raise InvalidInput(f"{where}.sequence_id", f"{sequence_id} is named twice")
    seen.add(sequence_id)


def _check_live(cache: DeviceCache, live: int, where: str) -> None:
    if live > cache.config.max_live_sequences:
        raise TooMany(where, f"more than {cache.config.max_live_sequences} live sequences")


def known_lease(cache: DeviceCache, sequence_id: SequenceId, where: str) -> Lease:
    lease = cache.leases.get(sequence_id)
    if lease is None:
        raise UnknownSequence(f"{where}.sequence_id", f"{sequence_id} holds no lease")
    return lease


def _running_lease(cache: DeviceCache, sequence_id: SequenceId, where: str) -> Lease:
    lease = cache.leases.get(sequence_id)
    if lease is None or lease.fetch is not None:
        lease = known_lease(cache, sequence_id, where)
        raise InvalidInput(f"{where}.sequence_id", f"{sequence_id} waits for the ack of its fetch")
    return lease


def check_ack(cache: DeviceCache, ack: Ack, where: str) -> None:
    open_transfer = cache.transfers.find(ack.ticket)
    if open_transfer is None:
        if not cache.transfers.was_issued(ack.ticket):
            raise UnknownTicket(f"{where}.ticket", f"{ack.ticket} was never issued to this worker")
        return  # a repeated or late ack of a closed ticket: applies to nothing
    if not 0 <= ack.num_done <= open_transfer.num_pages:
        raise InvalidInput(f"{where}.num_done", f"{ack.num_done} is not in 0..{open_transfer.num_pages}")


def check_publish(cache: DeviceCache, publish: Publish, where: str) -> Lease:
    lease = _running_lease(cache, publish.sequence_id, where)
    computed, num_bytes = publish.computed_tokens, len(publish.tokens)
    num_tokens, rest = divmod(len(lease.prompt) + len(lease.accepted) + num_bytes, TOKEN_BYTES)
    if rest:
        raise InvalidInput(f"{where}.tokens", f"{num_bytes} bytes are no whole number of int32 tokens")
    if num_tokens > cache.config.max_prompt_tokens:
        raise InvalidInput(f"{where}.tokens", f"{num_tokens} tokens; at most {cache.config.max_prompt_tokens}")
    if not lease.computed <= computed <= num_tokens:
        wrong = f"is less than {lease.computed}" if computed < lease.computed else f"of {num_tokens} accepted tokens"
        raise InvalidInput(f"{where}.computed_tokens", f"{computed} {wrong}")
    layout = cache.layout
    if layout.full and computed > lease.full_end * layout.page_tokens:
        raise InvalidInput(f"{where}.computed_tokens", f"{computed} lies beyond {lease.full_end} granted pages")
    for hold in lease.windows.values():
        if computed > hold.end * layout.page_tokens:
            raise InvalidInput(f"{where}.computed_tokens", f"{computed} lies beyond {hold.end} granted pages")
    return lease


def check_extend(cache: DeviceCache, extend: Extend, where: str) -> Lease:
    lease = _running_lease(cache, extend.sequence_id, where)
    if not 1 <= extend.num_tokens <= cache.config.max_prompt_tokens:
        limit = cache.config.max_prompt_tokens
        raise InvalidInput(f"{where}.num_tokens", f"{extend.num_tokens} is not in 1..{limit}")
    return lease


def check_acquire(cache: DeviceCache, acquire: Acquire, where: str, is_released: bool = False) -> None:
    if not 0 <= acquire.sequence_id <= MAX_SEQUENCE_ID:
        raise InvalidInput(f"{where}.sequence_id", "is no uint64")
    if acquire.sequence_id in cache.leases and not is_released:
        raise DuplicateSequence(f"{where}.sequence_id", f"{acquire.sequence_id} holds a lease already")
    check_tokens(acquire.tokens, f"{where}.tokens", cache.config.max_prompt_tokens)
    if acquire.reserve_pages < 0 or acquire.chunk_tokens < 0:
        raise InvalidInput(where, "reserve_pages and chunk_tokens must not be negative")


def check_one_acquire(cache: DeviceCache, acquire: Acquire, where: str) -> None:
    check_acquire(cache, acquire, where)
    _check_live(cache, len(cache.leases) + 1, where)
