"""The PrefixCache calls: each decodes, asks the manager once, encodes.

Knows no state of its own. The manager's methods do not wait, so nothing can come between a question and its answer.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from cache_service.codec import decode, encode
from cache_service.session import Requests, Sessions
from cache_service.watchers import Watchers
from protos.v1 import cache_pb2, cache_pb2_grpc
from rpc.interceptor import Context


class PrefixCacheServicer(cache_pb2_grpc.PrefixCacheServicer):
    """What people, routers, tools and workers may ask of the cache service."""

    def __init__(self, sessions: Sessions, watchers: Watchers, max_pin_ms: int) -> None:
        self._sessions = sessions
        self._manager = sessions.manager
        self._effects = sessions.effects
        self._clock = sessions.clock
        self._limits = sessions.limits.messages
        self._watchers = watchers
        self._max_pin_ms = max_pin_ms

    # The stubs know generators only; this one writes, since replies and orders come from two tasks.
    async def Session(  # type: ignore[override]  # noqa: N802
        self, request_iterator: Requests, context: Context
    ) -> None:
        await self._sessions.serve(request_iterator, context)

    async def Match(self, request: cache_pb2.MatchRequest, context: Context) -> cache_pb2.MatchResponse:  # noqa: N802
        namespace, tokens = decode.prompt(request, self._limits)
        return encode.match_response(self._manager.match(namespace, tokens, decode.worker_id(request)))

    async def Explain(  # noqa: N802
        self, request: cache_pb2.ExplainRequest, context: Context
    ) -> cache_pb2.ExplainResponse:
        namespace, tokens = decode.prompt(request, self._limits)
        return encode.explain_response(self._manager.explain(namespace, tokens, decode.worker_id(request)))

    async def Stats(self, request: cache_pb2.StatsRequest, context: Context) -> cache_pb2.StatsResponse:  # noqa: N802
        return encode.stats_response(self._manager.stats())

    async def Pin(self, request: cache_pb2.PinRequest, context: Context) -> cache_pb2.PinResponse:  # noqa: N802
        namespace, tokens = decode.prompt(request, self._limits)
        ttl_ms = decode.ttl_ms(request, self._max_pin_ms)
        pinned = self._manager.pin(namespace, tokens, ttl_ms, self._clock())
        self._effects.flush()
        return cache_pb2.PinResponse(pinned_tokens=pinned)

    async def Clear(self, request: cache_pb2.ClearRequest, context: Context) -> cache_pb2.ClearResponse:  # noqa: N802
        cleared = self._manager.clear(decode.scope(request), request.unused_only, self._clock())
        self._effects.flush()
        return cache_pb2.ClearResponse(num_pages=cleared.num_pages, num_host_rows=cleared.num_host_rows)

    def Watch(  # noqa: N802
        self, request: cache_pb2.WatchRequest, context: Context
    ) -> AsyncIterator[cache_pb2.WatchResponse]:
        return self._watchers.watch()
