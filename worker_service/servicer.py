"""ModelWorker's calls: decode, one call to the engine, encode.

Knows no schedule and no page. A call that ends early, for whatever reason, aborts its request.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple, Protocol

import grpc

from protos.v1 import worker_pb2, worker_pb2_grpc
from rpc.interceptor import Context
from rpc.request_id import current_request_id
from worker_service import codec
from worker_service.core.ports import Namespace
from worker_service.core.sequence import InvalidField, QueueFull
from worker_service.engine import Draining, Engine, Unservable, Wish
from worker_service.generation import Detokenizer, Generation, Piece, RequestFailed
from worker_service.session_codec import encode_namespace

# Longer texts go to the tokenizer in a thread, so that others' tokens are not held up.
LONG_TEXT_CHARS = 4096
# No tokenizer makes fewer tokens of a text than this; longer texts are refused without being read.
MAX_CHARS_PER_TOKEN = 128

_log = logging.getLogger(__name__)


class TookTooLong(Exception):
    """A call was not done within the service's own limit."""


CODES: dict[type[Exception], grpc.StatusCode] = {
    InvalidField: grpc.StatusCode.INVALID_ARGUMENT,
    Unservable: grpc.StatusCode.INVALID_ARGUMENT,
    QueueFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Draining: grpc.StatusCode.UNAVAILABLE,
    RequestFailed: grpc.StatusCode.INTERNAL,
    TookTooLong: grpc.StatusCode.DEADLINE_EXCEEDED,
}


class TextCodec(Protocol):
    """The model's tokenizer."""

    def encode(self, text: str) -> list[int]: ...

    def detokenizer(self) -> Detokenizer: ...


class ServicerLimits(NamedTuple):
    request_timeout_s: float
    drain_timeout_s: float
    prefix_caching: bool


class ModelWorkerServicer(worker_pb2_grpc.ModelWorkerServicer):
    """One engine's calls."""

    def __init__(
        self, engine: Engine, tokenizer: TextCodec, facts: codec.WorkerDescription, limits: ServicerLimits
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._facts = facts
        self._limits = limits

    async def Generate(  # noqa: N802 - the protocol's name
        self, request: worker_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[worker_pb2.GenerateResponse]:
        wish = Wish(
            self._namespace(request.salt, request.adapter, private=not self._limits.prefix_caching),
            await self._prompt(request),
            codec.decode_sampling(request.sampling, self._facts.limits),
            request.priority,
        )
        request_id = codec.check_name("request_id", request.request_id) or current_request_id()
        generation = self._engine.submit(wish, self._tokenizer.detokenizer())
        deadline_s = asyncio.get_running_loop().time() + self._limits.request_timeout_s
        try:
            while True:
                piece = await self._next(generation, deadline_s)
                yield _encode(piece)
                if piece.usage is not None:
                    _log.info("generated", extra={"request_id": request_id, "usage": piece.usage._asdict()})
                    return
        finally:
            if not generation.is_finished:
                _log.info("given up", extra={"request_id": request_id})
            self._engine.abort(generation)

    async def Tokenize(  # noqa: N802
        self, request: worker_pb2.TokenizeRequest, context: Context
    ) -> worker_pb2.TokenizeResponse:
        namespace = self._namespace(request.salt, request.adapter, private=False)
        token_ids = await self._encode(request.text)
        return worker_pb2.TokenizeResponse(
            token_ids=codec.pack_tokens(token_ids), namespace=encode_namespace(namespace)
        )

    async def Describe(  # noqa: N802
        self, request: worker_pb2.DescribeRequest, context: Context
    ) -> worker_pb2.DescribeResponse:
        scheduler = self._engine.scheduler
        return codec.encode_description(
            self._facts,
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            held=scheduler.num_held,
            epoch=self._engine.epoch,
            draining=self._engine.draining.is_set(),
        )

    async def Drain(  # noqa: N802
        self, request: worker_pb2.DrainRequest, context: Context
    ) -> worker_pb2.DrainResponse:
        timeout_s = request.timeout_ms / 1000 if request.timeout_ms else self._limits.drain_timeout_s
        result = await self._engine.drain(timeout_s)
        return worker_pb2.DrainResponse(num_finished=result.num_finished, num_aborted=result.num_aborted)

    def _namespace(self, salt: str, adapter: str, *, private: bool) -> Namespace:
        codec.check_name("salt", salt)
        if adapter:
            raise InvalidField("adapter", f"{adapter[:64]!r} is not loaded; this worker serves the bare model")
        # A salt that nobody shares is a namespace that nobody shares: nothing of it is ever reused.
        return Namespace(self._facts.model, "", f"{salt}/{secrets.token_hex(16)}" if private else salt)

    async def _prompt(self, request: worker_pb2.GenerateRequest) -> bytes:
        limits = self._facts.limits
        kind = request.WhichOneof("prompt")
        if kind == "token_ids":
            return codec.check_prompt_tokens("token_ids", request.token_ids.ids, limits)
        if kind == "text":
            return codec.check_prompt_tokens("text", codec.pack_tokens(await self._encode(request.text)), limits)
        raise InvalidField("prompt", "needs text or token_ids")

    async def _encode(self, text: str) -> Sequence[int]:
        if len(text) > MAX_CHARS_PER_TOKEN * self._facts.limits.max_model_len:
            raise InvalidField("text", f"{len(text)} characters are more than any prompt of this model has")
        if len(text) < LONG_TEXT_CHARS:
            return self._tokenizer.encode(text)
        return await asyncio.to_thread(self._tokenizer.encode, text)

    async def _next(self, generation: Generation, deadline_s: float) -> Piece:
        try:
            async with asyncio.timeout_at(deadline_s):
                return await generation.next_piece()
        except TimeoutError:
            raise TookTooLong(f"not done within {self._limits.request_timeout_s:g} s") from None


def _encode(piece: Piece) -> worker_pb2.GenerateResponse:
    response = codec.encode_piece(piece.token_ids, piece.text, piece.logprobs)
    if piece.finish_reason is not None and piece.usage is not None and piece.timing is not None:
        response.finish_reason = codec.encode_finish_reason(piece.finish_reason)
        response.usage.CopyFrom(codec.encode_usage(piece.usage, piece.timing))
    return response
