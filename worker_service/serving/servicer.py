"""ModelWorker's and WorkerAdmin's calls: decode, one call to the engine, encode.

A call that ends early aborts its request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

import grpc

from protos.v1 import worker_pb2, worker_pb2_grpc
from rpc.interceptor import Context
from rpc.request_id import current_request_id
from session.wire.parts import encode_namespace
from worker_service.core.errors import Draining, InvalidField, QueueFull, RequestFailed, Unservable, WorkerStopped
from worker_service.engine import DrainResult, Engine, EngineRequest
from worker_service.output_stream import Detokenizer, Piece
from worker_service.serving import codec
from worker_service.serving.text_encoder import TextEncoder

_log = logging.getLogger(__name__)


CODES: dict[type[Exception], grpc.StatusCode] = {
    InvalidField: grpc.StatusCode.INVALID_ARGUMENT,
    Unservable: grpc.StatusCode.INVALID_ARGUMENT,
    QueueFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Draining: grpc.StatusCode.UNAVAILABLE,
    RequestFailed: grpc.StatusCode.INTERNAL,
    WorkerStopped: grpc.StatusCode.UNAVAILABLE,
}


class TextCodec(Protocol):
    """The model's tokenizer. `encode` is called from threads."""

    def encode(self, text: str, *, special_tokens: bool = True) -> Sequence[int]: ...

    def detokenizer(self) -> Detokenizer: ...


class ModelWorkerServicer(worker_pb2_grpc.ModelWorkerServicer):
    """One engine's calls."""

    def __init__(
        self, engine: Engine, tokenizer: TextCodec, facts: codec.WorkerDescription, *, prefix_caching: bool = True
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._texts = TextEncoder(tokenizer, facts.limits)
        self._facts = facts
        self._prefix_caching = prefix_caching

    async def Generate(  # noqa: N802 - the protocol's name
        self, request: worker_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[worker_pb2.GenerateResponse]:
        # What costs nothing is checked first: a text is tokenized only for a request that is taken otherwise.
        self._engine.require_capacity()
        call = codec.decode_generate(request, self._facts)
        request_id = call.request_id or current_request_id()
        prompt = call.prompt
        if isinstance(prompt, str):
            prompt = await self._texts.prompt(prompt, special_tokens=not request.no_special_tokens)
        bypass_cache = request.bypass_cache or not self._prefix_caching
        engine_request = EngineRequest(call.namespace, prompt, call.sampling, call.priority, bypass_cache)
        stream = self._engine.submit(engine_request, self._tokenizer.detokenizer())
        try:
            while True:
                piece = await stream.next_piece()
                yield _encode(piece)
                if piece.usage is not None:
                    counts, times = piece.usage._asdict(), piece.timing._asdict() if piece.timing else {}
                    _log.info("generated", extra={"request_id": request_id, "usage": counts, **times})
                    return
        finally:
            if not stream.is_finished:
                _log.info("given up", extra={"request_id": request_id})
            self._engine.abort(stream)

    async def Tokenize(  # noqa: N802
        self, request: worker_pb2.TokenizeRequest, context: Context
    ) -> worker_pb2.TokenizeResponse:
        namespace = codec.decode_namespace(request.salt, request.adapter, self._facts.model)
        token_ids = await self._texts.tokens(request.text, special_tokens=not request.no_special_tokens)
        return worker_pb2.TokenizeResponse(token_ids=token_ids, namespace=encode_namespace(namespace))

    async def Describe(  # noqa: N802
        self, request: worker_pb2.DescribeRequest, context: Context
    ) -> worker_pb2.DescribeResponse:
        scheduler = self._engine.scheduler
        return codec.encode_description(
            self._facts,
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            held=scheduler.num_held,
            epoch=self._engine.epoch or "",
            draining=self._engine.draining.is_set(),
        )

    def close(self) -> None:
        self._texts.close()


class WorkerAdminServicer(worker_pb2_grpc.WorkerAdminServicer):
    """What ends a worker: for operators, on the admin address only."""

    def __init__(self, engine: Engine, drain_timeout_s: float, drained: asyncio.Event) -> None:
        self._engine = engine
        self._drain_timeout_s = drain_timeout_s
        self._drained = drained

    async def Drain(  # noqa: N802
        self, request: worker_pb2.DrainRequest, context: Context
    ) -> worker_pb2.DrainResponse:
        """Sets `drained` when nothing runs any more, even if the caller has gone by then."""
        timeout_s = request.timeout_ms / 1000 if request.timeout_ms else self._drain_timeout_s
        result = await asyncio.shield(asyncio.create_task(self._drain(timeout_s)))
        return worker_pb2.DrainResponse(num_finished=result.num_finished, num_aborted=result.num_aborted)

    async def _drain(self, timeout_s: float) -> DrainResult:
        try:
            return await self._engine.drain(timeout_s)
        finally:
            self._drained.set()


def _encode(piece: Piece) -> worker_pb2.GenerateResponse:
    response = codec.encode_piece(piece.token_ids, piece.text, piece.logprobs)
    if piece.finish_reason is not None and piece.usage is not None and piece.timing is not None:
        response.finish_reason = codec.encode_finish_reason(piece.finish_reason)
        response.usage.CopyFrom(codec.encode_usage(piece.usage, piece.timing))
    return response
