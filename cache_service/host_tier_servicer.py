"""The HostTier calls, for other projects' engines: each decodes, asks the manager once, encodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cache_service import host_tier_codec as codec
from cache_service.core.attachments.messages import LeaseEnd
from cache_service.worker_streams import Sessions
from protos.v1 import host_tier_pb2, host_tier_pb2_grpc
from rpc.interceptor import Context
from session.words import TransferStatus

# Passes of the event loop in which a cancellation reaches its call: the loop is woken, gRPC's operation ends, the
# call's task is told.
CANCELLING_PASSES = 3


class HostTierServicer(host_tier_pb2_grpc.HostTierServicer):
    """The manager's methods are synchronous; the effects that they leave are dispatched after each call."""

    def __init__(self, sessions: Sessions) -> None:
        self._manager = sessions.manager
        self._dispatcher = sessions.dispatcher
        self._clock = sessions.clock

    async def Attach(  # noqa: N802
        self, request: host_tier_pb2.AttachRequest, context: Context
    ) -> host_tier_pb2.AttachResponse:
        attached = self._manager.attachments.attach(codec.decode_attach(request, context.peer()), self._clock())
        self._dispatcher.flush()
        return codec.encode_attached(attached)

    async def Lookup(  # noqa: N802
        self, request: host_tier_pb2.LookupRequest, context: Context
    ) -> host_tier_pb2.LookupResponse:
        now_ms = self._clock()
        attachment = self._manager.attachments.find(codec.decode_id(request, "lookup"), "lookup", now_ms)
        lookup = codec.decode_lookup(request, attachment.attach.page_tokens)
        found = self._manager.attachments.lookup(attachment, lookup, now_ms)
        self._dispatcher.flush()
        answer = codec.encode_found(found)
        if found.lease:
            end = LeaseEnd(found.lease, TransferStatus.DONE, 0)
            await self._unless_gone(lambda: self._manager.attachments.release(attachment, (end,), self._clock()))
        return answer

    async def _unless_gone(self, undo: Callable[[], object]) -> None:
        """Undoes what was granted to a caller that has gone before the answer is sent: nobody will end the lease or the
        ticket, and until its time is over its pages count against the attachment's. A long path takes longer than some
        callers wait, and while its call runs no cancellation is noticed.

        Once the answer was sent, nothing is undone: the caller may be writing, and who cannot be told to stop keeps
        its ticket for its time, so that nobody else is given its pages meanwhile.
        """
        try:
            for _ in range(CANCELLING_PASSES):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            undo()
            self._dispatcher.flush()
            raise

    async def Reserve(  # noqa: N802
        self, request: host_tier_pb2.ReserveRequest, context: Context
    ) -> host_tier_pb2.ReserveResponse:
        now_ms = self._clock()
        attachment = self._manager.attachments.find(codec.decode_id(request, "reserve"), "reserve", now_ms)
        reserve = codec.decode_reserve(request, attachment.attach.page_tokens)
        reserved = self._manager.attachments.reserve(attachment, reserve, now_ms)
        answer = codec.encode_reserved(reserved)
        if reserved.ticket:
            await self._unless_gone(lambda: self._manager.attachments.withdraw(attachment, reserved.ticket))
        return answer

    async def Commit(  # noqa: N802
        self, request: host_tier_pb2.CommitRequest, context: Context
    ) -> host_tier_pb2.CommitResponse:
        now_ms = self._clock()
        attachment = self._manager.attachments.find(codec.decode_id(request, "commit"), "commit", now_ms)
        committed = self._manager.attachments.commit(attachment, codec.decode_commit(request), now_ms)
        self._dispatcher.flush()
        return codec.encode_committed(committed)

    async def Release(  # noqa: N802
        self, request: host_tier_pb2.ReleaseRequest, context: Context
    ) -> host_tier_pb2.ReleaseResponse:
        now_ms = self._clock()
        attachment = self._manager.attachments.find(codec.decode_id(request, "release"), "release", now_ms)
        num_released = self._manager.attachments.release(attachment, codec.decode_ends(request), now_ms)
        self._dispatcher.flush()
        return host_tier_pb2.ReleaseResponse(num_released=num_released)
