"""The PrefixCache and CacheAdmin calls: each decodes, asks the manager once, encodes.

The manager's methods do not wait, so nothing can come between a question and its answer;
Explain and Clear are made of slices, between which Steps are answered.
"""

from __future__ import annotations

import asyncio

from cache_service import codec, host_tier_codec
from cache_service.core.base.stats import ClearResult
from cache_service.core.verbs.clearing import Slices
from cache_service.slices import in_slices
from cache_service.watchers import Watchers
from cache_service.worker_streams import Requests, Sessions
from protos.v1 import cache_pb2, cache_pb2_grpc
from rpc.interceptor import Context

# How long Clear waits for connected workers to confirm that they forgot what it dropped.
FORGET_TIMEOUT_S = 5.0


class PrefixCacheServicer(cache_pb2_grpc.PrefixCacheServicer):
    """The calls of people, routers, tools and workers."""

    def __init__(self, sessions: Sessions, watchers: Watchers) -> None:
        self._sessions = sessions
        self._manager = sessions.manager
        self._limits = sessions.manager.limits
        self._watchers = watchers

    # The stubs know generators only; this one writes, since replies and orders come from two tasks.
    async def Session(  # type: ignore[override]  # noqa: N802
        self, request_iterator: Requests, context: Context
    ) -> None:
        await self._sessions.serve(request_iterator, context)

    # The stubs know messages only; this response is serialized already.
    async def Match(  # type: ignore[override]  # noqa: N802
        self, request: cache_pb2.MatchRequest, context: Context
    ) -> bytes:
        namespace, tokens = codec.decode_prompt(request, self._limits)
        return codec.encode_match_response(self._manager.match(namespace, tokens, codec.decode_worker_id(request)))

    async def Explain(  # noqa: N802
        self, request: cache_pb2.ExplainRequest, context: Context
    ) -> cache_pb2.ExplainResponse:
        if host_tier_codec.is_about_engines(request):
            asked = host_tier_codec.decode_explain(request, self._limits)
            engines = self._manager.attachments.explaining(asked, self._sessions.clock())
            return host_tier_codec.encode_explain(await in_slices(engines))
        namespace, tokens = codec.decode_prompt(request, self._limits)
        explaining = self._manager.explaining(
            namespace, tokens, codec.decode_worker_id(request), self._sessions.clock()
        )
        return codec.encode_explain_response(await in_slices(explaining))

    async def Stats(self, request: cache_pb2.StatsRequest, context: Context) -> cache_pb2.StatsResponse:  # noqa: N802
        return codec.encode_stats_response(self._manager.stats())

    # Written to rather than iterated over: only so a watcher that reads nothing can be cut off.
    async def Watch(  # type: ignore[override]  # noqa: N802
        self, request: cache_pb2.WatchRequest, context: Context
    ) -> None:
        await self._watchers.serve(context, present_state=request.present_state)


class CacheAdminServicer(cache_pb2_grpc.CacheAdminServicer):
    """Calls that change the cache for everybody: for operators, on the admin address only."""

    def __init__(self, sessions: Sessions, max_pin_ms: int) -> None:
        self._sessions = sessions
        self._manager = sessions.manager
        self._dispatcher = sessions.dispatcher
        self._clock = sessions.clock
        self._limits = sessions.manager.limits
        self._max_pin_ms = max_pin_ms
        self._clears: set[asyncio.Task[ClearResult]] = set()

    async def Pin(self, request: cache_pb2.PinRequest, context: Context) -> cache_pb2.PinResponse:  # noqa: N802
        namespace, tokens = codec.decode_prompt(request, self._limits)
        ttl_ms = codec.decode_ttl_ms(request, self._max_pin_ms)
        pinned = self._manager.pin(namespace, tokens, ttl_ms, self._clock())
        self._dispatcher.flush()
        return cache_pb2.PinResponse(pinned_tokens=pinned)

    async def _clear(self, clearing: Slices, dry_run: bool) -> ClearResult:
        if dry_run:
            return await in_slices(clearing)
        await self._dispatcher.clear_begins()
        keep_marks = False
        try:
            cleared = await in_slices(clearing, self._dispatcher.flush)
            keep_marks = cleared.num_hidden_rows > 0
            return cleared._replace(num_unconfirmed_workers=await self._sessions.forgotten(FORGET_TIMEOUT_S))
        finally:
            self._dispatcher.clear_ends(keep_marks=keep_marks)

    async def Clear(self, request: cache_pb2.ClearRequest, context: Context) -> cache_pb2.ClearResponse:  # noqa: N802
        clearing = self._manager.clearing(codec.decode_scope(request), request.unused_only, request.dry_run)
        # Once begun it runs to its end, whatever becomes of the call.
        task = asyncio.create_task(self._clear(clearing, request.dry_run), name="clear")
        self._clears.add(task)
        task.add_done_callback(self._clears.discard)
        return codec.encode_clear_response(await asyncio.shield(task))
