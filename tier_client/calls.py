"""The calls of HostTier with short deadlines. They raise nothing: None says that there was no reply.

After a failure nothing is asked for a while. An attachment that has ended is made anew by the next call.
"""

from __future__ import annotations

import logging
import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

import grpc

from protos.v1 import host_tier_pb2, host_tier_pb2_grpc
from session.limits import MAX_MESSAGE_BYTES
from session.words import HASH_BYTES, MissReason, TransferStatus
from tier_client import requests
from tier_client.breaker import Breaker
from tier_client.page_store import PageStore
from tier_client.values import NOT_ATTACHED, Attachment, Hit, KeyedPages, PagePath, PageRange, Ticket, TierClientConfig

# Of one path, until the service has told its limit.
MAX_PAGES = 16_384
# The caller's mistake, not the service's: it is logged, and others may go on asking.
REFUSALS = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.FAILED_PRECONDITION,
)

# Of values that no request can carry. `requests.Unsendable`, which names the field, is a ValueError; the others are of
# arguments of another shape.
UNSENDABLE = (ValueError, TypeError, OverflowError, AttributeError)

_REASONS = {int(reason): reason.name.lower() for reason in MissReason}

_Response = TypeVar("_Response")
_Made = TypeVar("_Made")
_Arguments = ParamSpec("_Arguments")

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
        self._mistakes = requests.Mistakes(_log)
        # None: the configuration never changes, so nothing is ever asked.
        self._attach_request = self._made(requests.attach_request, config)

    def close(self) -> None:
        self._channel.close()
        self._store.close()

    def is_away(self) -> bool:
        """Returns whether calls would find and take nothing at the moment. Does not wait."""
        return self._attach_request is None or self._breaker.is_open

    def was_read(self, num_bytes: int, took_s: float) -> None:
        """Counts what a rank's process read, and how long that took."""
        self._store.rate.add(num_bytes, took_s)

    def attached(self) -> Attachment | None:
        """Returns the attachment, made anew where it has ended; None while that is not possible."""
        if self._attach_request is None:
            return None
        with self._lock:
            if self._is_suspect or self._attachment is None:
                identity = None if self._breaker.is_open else self._store.identity()
                if identity is None:
                    return None
                if self._attachment is None or identity != self._tier_id:
                    self._attachment, self._tier_id = self._attach(self._attach_request, identity), identity
                self._is_suspect = False
            return self._attachment

    def suspect_store(self) -> None:
        """Has the next call look which store it is: a page was missing, or the store failed, so it may have lost
        everything."""
        self._is_suspect = True

    def _attach(self, known: host_tier_pb2.AttachRequest, identity: str) -> Attachment | None:
        request = host_tier_pb2.AttachRequest(host_tier_id=identity)
        request.MergeFrom(known)
        answer: host_tier_pb2.AttachResponse | None = self._ask(self._stub.Attach, request, NOT_ATTACHED)
        if answer is None:
            return None
        self._max_pages = answer.limits.max_pages
        return Attachment(answer.epoch, answer.attachment)

    def lookup(self, path: PagePath, local_pages: int) -> Hit | None:
        """Returns where the engine can resume, under a lease."""

        def request(attachment: Attachment) -> host_tier_pb2.LookupRequest:
            return requests.message(
                host_tier_pb2.LookupRequest,
                **requests.names(attachment),
                path=self._leading(path),
                local_pages=local_pages,
                lease=True,
                compute_tokens_per_s=self._config.compute_tokens_per_s,
                fetch_bytes_per_s=self._store.rate.bytes_per_s,
            )

        attachment, answer = self._call(self._stub.Lookup, request)
        if answer is None:
            return None
        reason = _REASONS.get(answer.miss_reason, "")
        pages = self._keyed(answer.pages)
        return Hit(answer.usable_pages, local_pages, answer.lease, pages, reason, answer.limiting_group, attachment)

    def reserve(self, path: PagePath, ranges: Iterable[PageRange]) -> Ticket | None:
        """Returns which of these pages are to be written; None also while the service takes none."""
        asked = self._made(tuple, ranges)
        if asked is None:
            return None
        num_asked = 0

        def request(attachment: Attachment) -> host_tier_pb2.ReserveRequest:
            nonlocal num_asked
            parts = requests.page_ranges(asked, self._max_pages)
            num_asked = sum(part.num_pages for part in parts)
            return host_tier_pb2.ReserveRequest(**requests.names(attachment), path=self._leading(path), ranges=parts)

        attachment, answer = self._call(self._stub.Reserve, request)
        if answer is None or answer.breaker_open:
            return None
        return Ticket(answer.ticket, self._keyed(answer.pages), answer.num_refused, attachment, num_asked)

    def commit(
        self, ticket: Ticket, rank: int, written: Sequence[tuple[int, int]], status: TransferStatus
    ) -> int | None:
        """`written`: group and number of its first pages that were stored. Returns how many pages became findable."""
        page_bytes = [group.page_bytes for group in self._config.groups]
        request = self._made(
            requests.commit_request,
            ticket.attachment,
            page_bytes,
            written,
            ticket=ticket.number,
            rank=rank,
            status=status,
        )
        if request is None:
            return None
        answer: host_tier_pb2.CommitResponse | None = self._ask(self._stub.Commit, request, ticket.attachment)
        return None if answer is None else answer.num_findable

    def release(self, hit: Hit, num_pages: int, status: TransferStatus) -> bool:
        """`num_pages` were read, from the hit's `local_pages` on. Returns whether the service was told.

        Told under the hit's attachment: under a later one the lease's number is another's.
        """
        request = self._made(
            requests.release_request, hit.attachment, lease=hit.lease, num_pages=num_pages, status=status
        )
        return request is not None and self._ask(self._stub.Release, request, hit.attachment) is not None

    def _leading(self, path: PagePath) -> host_tier_pb2.TierPath:
        return requests.leading(path, self._max_pages, self._config.page_tokens)

    def _made(
        self, make: Callable[_Arguments, _Made], *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> _Made | None:
        """Returns what `make` makes of the engine's arguments; None, and logs why, where it raises for them."""
        try:
            return make(*args, **kwargs)
        except UNSENDABLE as error:
            self._mistakes.tell(f"the host tier's service was not asked: {error}")
            return None

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

    def _call(self, method: Any, make: Callable[[Attachment], Any]) -> tuple[Attachment, Any]:
        """Asks under the present attachment, once more under a new one where that has ended. Returns which it was, and
        the answer, None for none, and for arguments that no request can carry: `make` raises for those."""
        attachment = NOT_ATTACHED
        for _ in range(2):
            now = self.attached()
            if now is None:
                break
            attachment = now
            request = self._made(make, attachment)
            if request is None:
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
