"""ModelWorker over real gRPC, on the toy engine: what callers send, get, and are told when it is wrong."""

from __future__ import annotations

import asyncio
import threading
from array import array
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import grpc.aio
import pytest

from protos.v1 import worker_pb2, worker_pb2_grpc
from rpc.client import open_channel
from rpc.errors import errors_to_status
from rpc.server import RpcServer, Service
from tests.worker_service.engine_desk import PAGE, VOCAB, Desk, Letters, open_desk, reference
from worker_service.codec import VocabLimits, WorkerDescription
from worker_service.core.ports import GroupKind, GroupSpec
from worker_service.servicer import CODES, ModelWorkerServicer, ServicerLimits

MAX_MODEL_LEN = 200
FACTS = WorkerDescription(
    "w",
    "i",
    "Toy",
    "digest",
    PAGE,
    VocabLimits(VOCAB, MAX_MODEL_LEN),
    "cpu",
    "float32",
    (GroupSpec("full", GroupKind.FULL, 64, 8),),
    {"redis_url": "***"},
)


class ToyTokenizer:
    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") for letter in text]

    def detokenizer(self) -> Letters:
        return Letters()


@dataclass
class Place:
    desk: Desk
    stub: worker_pb2_grpc.ModelWorkerAsyncStub
    channel: grpc.aio.Channel

    async def generate(self, request: worker_pb2.GenerateRequest) -> list[worker_pb2.GenerateResponse]:
        return [response async for response in self.stub.Generate(request, timeout=20)]


@asynccontextmanager
async def serving(*, request_timeout_s: float = 20.0, prefix_caching: bool = True, **config: int):
    async with open_desk(**config) as desk:
        servicer = ModelWorkerServicer(
            desk.engine, ToyTokenizer(), FACTS, ServicerLimits(request_timeout_s, 20.0, prefix_caching)
        )
        service = Service("stemcache.v1.ModelWorker", worker_pb2_grpc.add_ModelWorkerServicer_to_server, servicer)
        server = RpcServer([service], [errors_to_status(CODES)])
        address = await server.start("127.0.0.1:0")
        async with open_channel(str(address)) as channel:
            yield Place(desk, worker_pb2_grpc.ModelWorkerStub(channel), channel)  # type: ignore[arg-type]
        await server.stop(0)


def ids(*numbers: int) -> worker_pb2.TokenIds:
    return worker_pb2.TokenIds(ids=array("i", numbers).tobytes())


async def test_an_answer_streams_with_tokens_text_and_usage_in_its_last_message() -> None:
    async with serving() as place:
        request = worker_pb2.GenerateRequest(text="hello", sampling=worker_pb2.SamplingParams(max_tokens=9))
        responses = await place.generate(request)
        tokens = array("i", b"".join(response.token_ids for response in responses)).tolist()
        assert tokens == reference(ToyTokenizer().encode("hello"), 9)
        assert "".join(response.text for response in responses) == Letters().add(tokens)
        assert [bool(response.finish_reason) for response in responses] == [False] * (len(responses) - 1) + [True]
        last = responses[-1]
        assert last.finish_reason == worker_pb2.FINISH_REASON_LENGTH
        usage = last.usage
        assert (usage.prompt_tokens, usage.cached_tokens, usage.computed_tokens, usage.generated_tokens) == (5, 0, 5, 9)
        assert 0 < usage.queued_s <= usage.time_to_first_token_s


async def test_token_ids_and_text_are_the_same_prompt_and_the_default_is_sixteen_tokens() -> None:
    async with serving() as place:
        by_ids = await place.generate(worker_pb2.GenerateRequest(token_ids=ids(1, 2, 3, 4, 5)))
        by_text = await place.generate(worker_pb2.GenerateRequest(text="bcdef"))
        assert by_ids[-1].usage.generated_tokens == 16
        assert by_text[-1].usage.cached_tokens == 4
        assert b"".join(r.token_ids for r in by_ids) == b"".join(r.token_ids for r in by_text)


@pytest.mark.parametrize(("salt", "prefix_caching", "cached"), [("", True, 8), ("other", True, 0), ("", False, 0)])
async def test_only_the_same_salt_hits_and_nobody_without_prefix_caching(
    salt: str, prefix_caching: bool, cached: int
) -> None:
    async with serving(prefix_caching=prefix_caching) as place:
        prompt = "abcdefghij"
        await place.generate(worker_pb2.GenerateRequest(text=prompt))
        second = await place.generate(worker_pb2.GenerateRequest(text=prompt, salt=salt))
        assert second[-1].usage.cached_tokens == cached


sampling = worker_pb2.SamplingParams
NAN = float("nan")


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        (worker_pb2.GenerateRequest(), "prompt"),
        (worker_pb2.GenerateRequest(text=""), "text"),
        (worker_pb2.GenerateRequest(token_ids=ids()), "token_ids"),
        (worker_pb2.GenerateRequest(token_ids=worker_pb2.TokenIds(ids=b"12345")), "token_ids"),
        (worker_pb2.GenerateRequest(token_ids=ids(1, VOCAB)), "token_ids"),
        (worker_pb2.GenerateRequest(token_ids=ids(1, -1)), "token_ids"),
        (worker_pb2.GenerateRequest(token_ids=ids(*[1] * MAX_MODEL_LEN)), "token_ids"),
        (worker_pb2.GenerateRequest(text="a" * 40_000), "text"),
        (worker_pb2.GenerateRequest(text="a", adapter="lora"), "adapter"),
        (worker_pb2.GenerateRequest(text="a", salt="s" * 300), "salt"),
        (worker_pb2.GenerateRequest(text="a", sampling=sampling(temperature=NAN)), "sampling.temperature"),
        (worker_pb2.GenerateRequest(text="a", sampling=sampling(temperature=-1)), "sampling.temperature"),
        (worker_pb2.GenerateRequest(text="a", sampling=sampling(top_p=1.5)), "sampling.top_p"),
        (worker_pb2.GenerateRequest(text="a", sampling=sampling(min_p=2)), "sampling.min_p"),
        (worker_pb2.GenerateRequest(text="a", sampling=sampling(repetition_penalty=-1)), "sampling.repetition_penalty"),
        (worker_pb2.GenerateRequest(text="a", sampling=sampling(stop=[""])), "sampling.stop"),
        (worker_pb2.GenerateRequest(text="a", sampling=sampling(stop=["s" * 2000])), "sampling.stop"),
        (worker_pb2.GenerateRequest(text="a", sampling=sampling(stop=["s"] * 100)), "sampling.stop"),
        (worker_pb2.GenerateRequest(text="a", sampling=sampling(stop_token_ids=b"123")), "sampling.stop_token_ids"),
        (
            worker_pb2.GenerateRequest(text="a", sampling=sampling(stop_token_ids=ids(99).ids)),
            "sampling.stop_token_ids",
        ),
        (worker_pb2.GenerateRequest(text="a", sampling=sampling(logprobs=1000)), "sampling.logprobs"),
    ],
)
async def test_bad_input_is_named_and_changes_nothing(request_: worker_pb2.GenerateRequest, named: str) -> None:
    async with serving() as place:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await place.generate(request_)
        assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert (error.value.details() or "").startswith(f"{named}:")
        assert place.desk.engine.scheduler.num_unfinished == 0
        assert (await place.generate(worker_pb2.GenerateRequest(text="ab")))[-1].finish_reason


@pytest.mark.parametrize("method", ["Generate", "Tokenize", "Describe", "Drain"])
async def test_bytes_that_are_no_message_are_an_invalid_argument(method: str) -> None:
    async with serving() as place:
        path = f"/stemcache.v1.ModelWorker/{method}"
        with pytest.raises(grpc.aio.AioRpcError) as error:
            if method == "Generate":
                _ = [item async for item in place.channel.unary_stream(path)(b"\xff\xff\xff\xff", timeout=20)]
            else:
                await place.channel.unary_unary(path)(b"\xff\xff\xff\xff", timeout=20)
        assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_full_queue_is_resource_exhausted() -> None:
    async with serving(max_waiting=1) as place:
        await place.desk.engine.connected.wait()
        place.desk.runner.gate = threading.Event()
        request = worker_pb2.GenerateRequest(token_ids=ids(*range(10)), sampling=sampling(max_tokens=1))
        running = asyncio.create_task(place.generate(request))
        await asyncio.to_thread(place.desk.runner.entered.wait, 20)
        held = asyncio.create_task(place.generate(request))  # waits for its sibling's prefix
        while place.desk.engine.scheduler.num_waiting == 0:
            await asyncio.sleep(0.001)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await place.generate(request)
        assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        place.desk.runner.gate.set()
        assert (await running)[-1].usage.computed_tokens == 10
        assert (await held)[-1].usage.cached_tokens == 8


async def test_a_cancelled_call_frees_what_it_holds() -> None:
    async with serving() as place:
        call = place.stub.Generate(worker_pb2.GenerateRequest(text="abcdefgh", sampling=sampling(max_tokens=150)))
        await call.read()
        call.cancel()
        await place.desk.settled()


@pytest.mark.parametrize("by_client", [True, False])
async def test_a_deadline_frees_what_the_call_holds(by_client: bool) -> None:
    async with serving(request_timeout_s=20 if by_client else 0.2) as place:
        await place.desk.engine.connected.wait()
        place.desk.runner.gate = threading.Event()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            request = worker_pb2.GenerateRequest(text="abcdefgh")
            _ = [item async for item in place.stub.Generate(request, timeout=0.2 if by_client else 20)]
        assert error.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        place.desk.runner.gate.set()
        await place.desk.settled()


async def test_a_failed_forward_pass_is_internal() -> None:
    async with serving() as place:
        place.desk.runner.fail_when = lambda batch: True
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await place.generate(worker_pb2.GenerateRequest(text="abc"))
        assert error.value.code() == grpc.StatusCode.INTERNAL
        assert "forward pass" in (error.value.details() or "")


async def test_tokenize_gives_the_namespace_that_generate_uses() -> None:
    async with serving() as place:
        response = await place.stub.Tokenize(worker_pb2.TokenizeRequest(text="abc", salt="tenant"), timeout=20)
        assert response.token_ids == ids(0, 1, 2).ids
        assert (response.namespace.model, response.namespace.salt) == ("digest", "tenant")
        seen: list[tuple[str, str]] = []
        place.desk.cache.on_step = lambda step: seen.extend(
            (a.namespace.model, a.namespace.salt) for a in step.acquires
        )
        await place.generate(worker_pb2.GenerateRequest(text="abc", salt="tenant"))
        assert seen == [("digest", "tenant")]


async def test_describe_tells_what_the_worker_is_and_does() -> None:
    async with serving() as place:
        await place.desk.engine.connected.wait()
        response = await place.stub.Describe(worker_pb2.DescribeRequest(), timeout=20)
        assert (response.worker_id, response.model_type, response.namespace.model) == ("w", "Toy", "digest")
        assert (response.page_tokens, response.max_model_len, response.vocab_size) == (PAGE, MAX_MODEL_LEN, VOCAB)
        assert (response.num_running, response.num_waiting, response.draining) == (0, 0, False)
        assert response.cache_epoch == "epoch-1"
        assert response.groups[0].name == "full"
        assert dict(response.config) == {"redis_url": "***"}


async def test_drain_answers_when_everything_has_finished_and_then_nothing_is_taken() -> None:
    async with serving() as place:
        place.desk.runner.gate = threading.Event()
        running = asyncio.create_task(place.generate(worker_pb2.GenerateRequest(text="abc")))
        await asyncio.to_thread(place.desk.runner.entered.wait, 20)
        draining = asyncio.ensure_future(place.stub.Drain(worker_pb2.DrainRequest(), timeout=20))
        while not place.desk.engine.draining.is_set():
            await asyncio.sleep(0.001)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await place.generate(worker_pb2.GenerateRequest(text="abc"))
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE
        place.desk.runner.gate.set()
        response = await draining
        assert (response.num_finished, response.num_aborted) == (1, 0)
        assert (await running)[-1].finish_reason


async def test_a_stop_string_ends_the_stream() -> None:
    async with serving() as place:
        text = Letters().add(reference([0, 1, 2], 20))
        request = worker_pb2.GenerateRequest(text="abc", sampling=sampling(max_tokens=20, stop=[text[6:9]]))
        responses = await place.generate(request)
        assert "".join(response.text for response in responses) == text[: text.index(text[6:9])]
        assert responses[-1].finish_reason == worker_pb2.FINISH_REASON_STOP
