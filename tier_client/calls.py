"""The calls of HostTier with short deadlines. They raise nothing: None says that there was no reply.

After a failure nothing is asked for a while. An attachment that has ended is made anew by the next call.
"""

from __future__ import annotations

import logging
import struct
import threading
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import grpc

from protos.v1 import cache_pb2, host_tier_pb2, host_tier_pb2_grpc, types_pb2
from session.limits import MAX_MESSAGE_BYTES
from session.words import HASH_BYTES, MissReason, TransferStatus
from tier_client.breaker import Breaker
from tier_client.page_store import PageStore
from tier_client.values import NOT_ATTACHED, Attachment, Hit, KeyedPages, PagePath, PageRange, Ticket, TierClientConfig

PROTOCOL_VERSION = 1
# Of one path, until the service has told its limit.
MAX_PAGES = 16_384
# The caller's mistake, not the service's: it is logged, and others may go on asking.
REFUSALS = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.FAILED_PRECONDITION,
)

# Of what is in no message: numbers out of range, texts that are no UTF-8 (a UnicodeError is a ValueError), other types.
UNSENDABLE = (ValueError, TypeError, OverflowError)

_REASONS = {int(reason): reason.name.lower() for reason in MissReason}

_Response = TypeVar("_Response")

_log = logging.getLogger(__name__)


class HostTierCalls:
    """One attachment, held by any number of threads. `store` tells which store the engine reaches, and how fast."""

    def __init__(self, config: TierClientConfig, store: PageStore) -> None:
        self._config, self._store, self._breaker = config, store, Breaker(config.pause_s)
        options = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES), ("grpc.max_send_message_length", -1)]
        self._channel = grpc.insecure_channel(config.cache_address, options)
        self._stub: Any = host_tier_pb2_grpc.HostTierStub(self._channel)
        self._lock = threading.Lock()
        self._attachment: Attachment | None = None
        self._tier_id = ""
        self._max_pages = MAX_PAGES
        self._is_suspect = False

    def close(self) -> None:
        self._channel.close()
        self._store.close()

    def is_away(self) -> bool:
        """Returns whether calls would find and take nothing at the moment. Does not wait."""
        return self._breaker.is_open

    def was_read(self, num_bytes: int, took_s: float) -> None:
        """Counts what a rank's process read, and how long that took."""
        self._store.rate.add(num_bytes, took_s)

    def attached(self) -> Attachment | None:
        """Returns the attachment, made anew where it has ended; None while that is not possible."""
        with self._lock:
            if self._is_suspect or self._attachment is None:
                identity = None if self._breaker.is_open else self._store.identity()
                if identity is None:
                    return None
                if self._attachment is None or identity != self._tier_id:
                    self._attachment, self._tier_id = self._attach(identity), identity
                self._is_suspect = False
            return self._attachment

    def suspect_store(self) -> None:
        """Has the next call look which store it is: a page was missing, or the store failed, so it may have lost
        everything."""
        self._is_suspect = True

    def _attach(self, identity: str) -> Attachment | None:
        config = self._config
        groups = [
            host_tier_pb2.TierGroup(
                name=one.name,
                kind=types_pb2.GroupKind.ValueType(one.kind),
                window_tokens=one.window_tokens,
                page_bytes=one.page_bytes,
                replicated=one.replicated,
            )
            for one in config.groups
        ]
        request = host_tier_pb2.AttachRequest(
            protocol_version=PROTOCOL_VERSION,
            engine=config.engine,
            fingerprint=config.attached_fingerprint(),
            model=config.model,
            page_tokens=config.page_tokens,
            groups=groups,
            num_ranks=config.num_ranks,
            host_tier_id=identity,
        )
        answer: host_tier_pb2.AttachResponse | None = self._ask(self._stub.Attach, request, NOT_ATTACHED)
        if answer is None:
            return None
        self._max_pages = answer.limits.max_pages
        return Attachment(answer.epoch, answer.attachment)

    def lookup(self, path: PagePath, local_pages: int) -> Hit | None:
        """Returns where the engine can resume, under a lease."""
        attachment, answer = self._call(
            self._stub.Lookup,
            lambda id_: host_tier_pb2.LookupRequest(
                **id_,
                path=self._leading(path),
                local_pages=local_pages,
                lease=True,
                compute_tokens_per_s=self._config.compute_tokens_per_s,
                fetch_bytes_per_s=self._store.rate.bytes_per_s,
            ),
        )
        if answer is None:
            return None
        reason = _REASONS.get(answer.miss_reason, "")
        pages = self._keyed(answer.pages)
        return Hit(answer.usable_pages, local_pages, answer.lease, pages, reason, answer.limiting_group, attachment)

    def reserve(self, path: PagePath, ranges: Iterable[PageRange]) -> Ticket | None:
        """Returns which of these pages are to be written; None also while the service takes none."""
        asked = tuple(ranges)

        def request(id_: dict[str, Any]) -> host_tier_pb2.ReserveRequest:
            parts = [
                host_tier_pb2.TierPageRange(group=one.group, first_page=one.first_page, num_pages=count)
                for one in asked
                if (count := min(one.end_page, self._max_pages) - one.first_page) > 0
            ]
            return host_tier_pb2.ReserveRequest(**id_, path=self._leading(path), ranges=parts)

        attachment, answer = self._call(self._stub.Reserve, request)
        if answer is None or answer.breaker_open:
            return None
        return Ticket(answer.ticket, self._keyed(answer.pages), answer.num_refused, attachment)

    def commit(
        self, ticket: Ticket, rank: int, written: Sequence[tuple[int, int]], status: TransferStatus
    ) -> int | None:
        """`written`: group and number of its first pages that were stored. Returns how many pages became findable."""
        groups = self._config.groups
        told = [
            host_tier_pb2.WrittenPages(group=group, num_pages=count, num_bytes=count * groups[group].page_bytes)
            for group, count in written
        ]
        request = host_tier_pb2.CommitRequest(
            **_id(ticket.attachment),
            ticket=ticket.number,
            rank=rank,
            status=cache_pb2.TransferStatus.ValueType(status),
            written=told,
        )
        answer: host_tier_pb2.CommitResponse | None = self._ask(self._stub.Commit, request, ticket.attachment)
        return None if answer is None else answer.num_findable

    def release(self, hit: Hit, num_pages: int, status: TransferStatus) -> bool:
        """`num_pages` were read, from the hit's `local_pages` on. Returns whether the service was told.

        Told under the hit's attachment: under a later one the lease's number is another's.
        """
        end = host_tier_pb2.LeaseEnd(
            lease=hit.lease, num_pages=num_pages, status=cache_pb2.TransferStatus.ValueType(status)
        )
        request = host_tier_pb2.ReleaseRequest(**_id(hit.attachment), ends=[end])
        return self._ask(self._stub.Release, request, hit.attachment) is not None

    def _leading(self, path: PagePath) -> host_tier_pb2.TierPath:
        """Returns the first pages of a path, as many as the service takes."""
        ids = path.page_ids[: self._max_pages * HASH_BYTES]
        tokens = array("i", path.tokens[: self._max_pages * self._config.page_tokens + 1]).tobytes()
        return host_tier_pb2.TierPath(adapter=path.adapter, salt=path.salt, page_ids=ids, tokens=tokens)

    def _keyed(self, pages: Iterable[host_tier_pb2.TierPages]) -> tuple[KeyedPages, ...]:
        return tuple(
            KeyedPages(
                one.group,
                one.key_prefix,
                struct.unpack(f"<{len(one.pages) // 4}I", one.pages),
                tuple(one.page_hashes[at : at + HASH_BYTES] for at in range(0, len(one.page_hashes), HASH_BYTES)),
                self._config.groups[one.group].replicated,
            )
            for one in pages
        )

    def _call(self, method: Any, make: Callable[[dict[str, Any]], Any]) -> tuple[Attachment, Any]:
        """Asks under the present attachment, once more under a new one where that has ended. Returns which it was, and
        the answer, None for none, and for arguments that no request can carry: `make` raises for those."""
        attachment = NOT_ATTACHED
        for _ in range(2):
            now = self.attached()
            if now is None:
                break
            attachment = now
            try:
                request = make(_id(attachment))
            except UNSENDABLE as error:
                _log.warning("the host tier's service was not asked: %s", error)
                break
            answer = self._ask(method, request, attachment)
            if answer is not None or not self._ended(attachment):
                return attachment, answer
        return attachment, None

    def _ended(self, attachment: Attachment) -> bool:
        with self._lock:
            return self._attachment is not attachment

    def _ask(self, method: Callable[..., _Response], request: Any, named: Attachment) -> _Response | None:
        """`named`: the attachment that the request names."""
        if self._breaker.is_open:
            return None
        try:
            return method(request, timeout=self._config.call_timeout_s)
        except grpc.RpcError as error:
            self._failed(error, named)
        except ValueError as error:  # the channel was closed meanwhile
            _log.debug("the host tier's service was not asked: %s", error)
        return None

    def _failed(self, error: Any, named: Attachment) -> None:
        code, details = error.code(), error.details()
        if code is grpc.StatusCode.ABORTED:
            # Nobody holds the lock here but `attached`, whose Attach is never answered so.
            if named == self._attachment:  # a lease of a former one says nothing of the present one
                self._attachment = None
            _log.info("the attachment has ended: %s", details)
        elif code in REFUSALS:
            _log.warning("the host tier's service refused a call: %s", details)
        else:
            self._breaker.failed()
            _log.warning("the host tier's service does not answer: %s", details)


def _id(attachment: Attachment) -> dict[str, Any]:
    return {"epoch": attachment.epoch, "attachment": attachment.number}
