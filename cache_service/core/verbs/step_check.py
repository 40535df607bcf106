"""Checks of a worker's messages, made before they are applied. Reads only.

The field of an item's error is named from the item on, as "computed_tokens"; stepping puts "step.publishes[0]." before.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from cache_service.core.base.errors import DuplicateSequence, UnknownSequence, UnknownTicket
from cache_service.core.device.lease_table import GROWTH, Lease
from cache_service.core.device_cache import DeviceCache
from session.errors import FieldError, InvalidInput, TooMany
from session.limits import MAX_NAME_CHARS, MAX_SEQUENCE_ID, MAX_SNAPSHOT_BOUNDARIES
from session.messages import Ack, Acquire, Extend, Publish, Release, Shrink
from session.words import TOKEN_BYTES, Namespace, SequenceId


def check_tokens(tokens: bytes, where: str, most: int, kept_tokens: int = 0) -> int:
    """Returns how many tokens the packed bytes and the kept ones before them hold."""
    if len(tokens) % TOKEN_BYTES:
        raise InvalidInput(where, f"{len(tokens)} bytes are no whole number of int32 tokens")
    count = len(tokens) // TOKEN_BYTES + kept_tokens
    if count < 1:
        raise InvalidInput(where, "is empty")
    if count > most:
        raise InvalidInput(where, f"{count} tokens; at most {most} are allowed")
    return count


def check_page_ids(packed: bytes, pool_pages: int, where: str) -> None:
    """Raises InvalidInput for a page that the pool lacks, or that stands there twice; 0 is a hole."""
    ids = array("I")
    ids.frombytes(packed)
    if max(ids, default=0) > pool_pages:
        raise InvalidInput(where, f"names a page beyond the pool of {pool_pages}")
    num_holes = ids.count(0)
    if len(set(ids)) - (num_holes > 0) != len(ids) - num_holes:
        raise InvalidInput(where, "names a page twice")


def _not_running(cache: DeviceCache, sequence_id: SequenceId) -> FieldError:
    if sequence_id not in cache.leases:
        return UnknownSequence("sequence_id", f"{sequence_id} holds no lease")
    return InvalidInput("sequence_id", f"{sequence_id} waits for the acks of its fetches")


def check_acks(cache: DeviceCache, acks: Sequence[Ack]) -> None:
    """Raises InvalidInput or UnknownTicket. A wrong ack is of no sequence: it ends the stream, no part of its Step
    counts."""
    for number, ack in enumerate(acks):
        open_transfer = cache.transfers.find(ack.ticket)
        if open_transfer is None:
            if not cache.transfers.was_issued(ack.ticket):
                reason = f"{ack.ticket} was never issued to this worker"
                raise UnknownTicket(f"step.acks[{number}].ticket", reason)
            continue  # a repeated or late ack of a closed ticket: applies to nothing
        if not 0 <= ack.num_done <= open_transfer.num_pages:
            reason = f"{ack.num_done} is not in 0..{open_transfer.num_pages}"
            raise InvalidInput(f"step.acks[{number}].num_done", reason)


def check_publish(cache: DeviceCache, publish: Publish) -> Lease:
    lease = cache.leases.get(publish.sequence_id)
    if lease is None or lease.fetches:
        raise _not_running(cache, publish.sequence_id)
    computed, num_bytes = publish.computed_tokens, len(publish.tokens)
    if num_bytes % TOKEN_BYTES:
        raise InvalidInput("tokens", f"{num_bytes} bytes are no whole number of int32 tokens")
    num_tokens = (len(lease.prompt) + len(lease.accepted) + num_bytes) // TOKEN_BYTES
    if num_tokens > cache.config.max_sequence_tokens:
        raise InvalidInput("tokens", f"{num_tokens} tokens; at most {cache.config.max_sequence_tokens}")
    if num_bytes and cache.leases.total.num_bytes + num_bytes > GROWTH * cache.config.max_total_lease_bytes:
        most = GROWTH * cache.config.max_total_lease_bytes
        raise TooMany("tokens", f"live sequences of all workers together may grow to {most} bytes of tokens")
    if not lease.computed_tokens <= computed <= num_tokens:
        wrong = (
            f"is less than {lease.computed_tokens}"
            if computed < lease.computed_tokens
            else f"of {num_tokens} accepted tokens"
        )
        raise InvalidInput("computed_tokens", f"{computed} {wrong}")
    for group in cache.groups:
        end = group.end(lease)
        if end is not None and computed > end * group.page_tokens:
            raise InvalidInput("computed_tokens", f"{computed} lies beyond {end} granted pages")
    return lease


def check_release(cache: DeviceCache, release: Release) -> Lease:
    lease = cache.leases.get(release.sequence_id)
    if lease is None:
        raise _not_running(cache, release.sequence_id)
    page_tokens = cache.layout.page_tokens
    if release.rolling_tokens and (release.rolling_tokens < 0 or release.rolling_tokens % page_tokens):
        raise InvalidInput("rolling_tokens", f"{release.rolling_tokens} is no boundary of pages of {page_tokens}")
    return lease


def check_extend(cache: DeviceCache, extend: Extend) -> Lease:
    lease = cache.leases.get(extend.sequence_id)
    if lease is None or lease.fetches:
        raise _not_running(cache, extend.sequence_id)
    if not 1 <= extend.num_tokens <= cache.config.max_sequence_tokens:
        limit = cache.config.max_sequence_tokens
        raise InvalidInput("num_tokens", f"{extend.num_tokens} is not in 1..{limit}")
    if extend.leave_at:
        _check_leave_at(cache, extend.leave_at)
    return lease


def check_shrink(cache: DeviceCache, shrink: Shrink) -> Lease:
    lease = cache.leases.get(shrink.sequence_id)
    if lease is None or lease.fetches:
        raise _not_running(cache, shrink.sequence_id)
    if shrink.num_tokens < lease.num_tokens:
        raise InvalidInput("num_tokens", f"{shrink.num_tokens} is less than its {lease.num_tokens} tokens")
    return lease


def _check_leave_at(cache: DeviceCache, boundaries: tuple[int, ...]) -> None:
    if len(boundaries) > MAX_SNAPSHOT_BOUNDARIES:
        raise TooMany("leave_at", f"has {len(boundaries)} boundaries; at most {MAX_SNAPSHOT_BOUNDARIES}")
    page_tokens = cache.layout.page_tokens
    for boundary in boundaries:
        if boundary <= 0 or boundary % page_tokens:
            raise InvalidInput("leave_at", f"{boundary} is no boundary of pages of {page_tokens}")


def check_acquire(cache: DeviceCache, acquire: Acquire) -> None:
    check_sequence(cache, acquire.sequence_id, acquire.namespace)
    if acquire.kept_tokens < 0:
        raise InvalidInput("kept_tokens", "must not be negative")
    check_tokens(acquire.tokens, "tokens", cache.config.max_sequence_tokens, acquire.kept_tokens)
    if acquire.reserve_pages < 0 or acquire.chunk_tokens < 0:
        name = "reserve_pages" if acquire.reserve_pages < 0 else "chunk_tokens"
        raise InvalidInput(name, "must not be negative")
    if acquire.leave_at:
        _check_leave_at(cache, acquire.leave_at)


def check_sequence(cache: DeviceCache, sequence_id: SequenceId, namespace: Namespace) -> None:
    """Raises InvalidInput, DuplicateSequence, TooMany where there may be no lease of this id in that namespace."""
    if not 0 <= sequence_id <= MAX_SEQUENCE_ID:
        raise InvalidInput("sequence_id", "is no uint64")
    if sequence_id in cache.leases:
        raise DuplicateSequence("sequence_id", f"{sequence_id} holds a lease already")
    if len(cache.leases) >= cache.config.max_live_sequences:
        raise TooMany("sequence_id", f"more than {cache.config.max_live_sequences} live sequences")
    check_namespace(cache, namespace)


def check_namespace(cache: DeviceCache, namespace: Namespace) -> None:
    """Raises InvalidInput where this worker may have no root of that namespace."""
    if cache.model and namespace.model != cache.model:
        raise InvalidInput("namespace.model", f"{namespace.model!r} is not {cache.model!r}, this worker's model")
    if namespace in cache.tree.roots:
        return  # its names passed when its root was made
    for name, text in zip(("model", "adapter", "salt"), namespace, strict=True):
        if len(text) > MAX_NAME_CHARS:
            raise InvalidInput(f"namespace.{name}", f"has {len(text)} characters; at most {MAX_NAME_CHARS}")
