"""The HostTier calls, for other projects' engines: each decodes, asks the manager once, encodes."""

from __future__ import annotations

from cache_service import host_tier_codec as codec
from cache_service.worker_streams import Sessions
from protos.v1 import host_tier_pb2, host_tier_pb2_grpc
from rpc.interceptor import Context


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
        return codec.encode_found(found)

    async def Reserve(  # noqa: N802
        self, request: host_tier_pb2.ReserveRequest, context: Context
    ) -> host_tier_pb2.ReserveResponse:
        now_ms = self._clock()
        attachment = self._manager.attachments.find(codec.decode_id(request, "reserve"), "reserve", now_ms)
        reserve = codec.decode_reserve(request, attachment.attach.page_tokens)
        return codec.encode_reserved(self._manager.attachments.reserve(attachment, reserve, now_ms))

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
