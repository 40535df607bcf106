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

from protos.v1 import types_pb2, worker_pb2, worker_pb2_grpc
from rpc.client import open_channel
from rpc.deadline import deadlines
from rpc.errors import errors_to_status
from rpc.options import ServerLimits
from rpc.server import RpcServer, Service
from session.limits import MAX_MESSAGE_BYTES
from session.words import GroupKind, GroupSpec
from tests.worker_service.engine_harness import PAGE, VOCAB, EngineHarness, Letters, reference, running_engine
from worker_service.core import errors
from worker_service.core.sequence import Timing, Usage
from worker_service.serving.codec import VocabLimits, WorkerDescription, encode_usage
from worker_service.serving.servicer import CODES, ModelWorkerServicer, WorkerAdminServicer

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
    """A letter is a token; the first one is there twice, as if a tokenizer had put a special token before it."""

    doubles_first = False

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        tokens = [ord(letter) - ord("a") for letter in text]
        return tokens[:1] * (self.doubles_first and special_tokens) + tokens

    def detokenizer(self) -> Letters:
        return Letters()


@dataclass
class Place:
    harness: EngineHarness
    stub: worker_pb2_grpc.ModelWorkerAsyncStub
    admin: worker_pb2_grpc.WorkerAdminAsyncStub
    tokenizer: ToyTokenizer
    drained: asyncio.Event
    channel: grpc.aio.Channel

    async def generate(self, request: worker_pb2.GenerateRequest) -> list[worker_pb2.GenerateResponse]:
        return [response async for response in self.stub.Generate(request, timeout=20)]


@asynccontextmanager
async def serving(*, request_timeout_s: float = 20.0, prefix_caching: bool = True, **config: int):
    async with running_engine(**config) as harness:
        tokenizer = ToyTokenizer()
        servicer = ModelWorkerServicer(harness.engine, tokenizer, FACTS, prefix_caching=prefix_caching)
        drained = asyncio.Event()
        admin = WorkerAdminServicer(harness.engine, 20.0, drained)
        services = [
            Service("stemcache.v1.ModelWorker", worker_pb2_grpc.add_ModelWorkerServicer_to_server, servicer),
            Service("stemcache.v1.WorkerAdmin", worker_pb2_grpc.add_WorkerAdminServicer_to_server, admin),
        ]
        limited = deadlines(20, {"/stemcache.v1.ModelWorker/Generate": request_timeout_s})
        server = RpcServer(services, [errors_to_status(CODES), limited], ServerLimits(MAX_MESSAGE_BYTES))
        address = await server.start("127.0.0.1:0")
        async with open_channel(str(address), MAX_MESSAGE_BYTES) as channel:
            stubs = (worker_pb2_grpc.ModelWorkerStub(channel), worker_pb2_grpc.WorkerAdminStub(channel))
            yield Place(harness, *stubs, tokenizer, drained, channel)  # type: ignore[arg-type]
        await server.stop(0)
        servicer.close()


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
        (worker_pb2.GenerateRequest(text="a", priority=1001), "priority"),
        (worker_pb2.GenerateRequest(text="a", priority=-(2**31)), "priority"),
        (worker_pb2.GenerateRequest(text="a", sampling=sampling(temperature=NAN)), "sampling.temperature"),
        (worker_pb2.GenerateRequest(text="a", sampling=sampling(temperature=-1)), "sampling.temperature"),
        (worker_pb2.GenerateRequest(text="a", sampling=sampling(top_p=1.5)), "sampling.top_p"),
        (worker_pb2.GenerateRequest(text="a", sampling=sampling(min_p=2)), "sampling.min_p"),
        (worker_pb2.GenerateRequest(text="a", sampling=sampling(repetition_penalty=-1)), "sampling.repetition_penalty"),
        (worker_pb2.GenerateRequest(text="a", sampling=sampling(presence_penalty=2.5)), "sampling.presence_penalty"),
        (worker_pb2.GenerateRequest(text="a", sampling=sampling(frequency_penalty=-3)), "sampling.frequency_penalty"),
        (
            worker_pb2.GenerateRequest(text="a", sampling=sampling(frequency_penalty=float("nan"))),
            "sampling.frequency_penalty",
        ),
        (worker_pb2.GenerateRequest(text="a", sampling=sampling(stop=[""])), "sampling.stop"),
        (worker_pb2.GenerateRequest(text="a", sampling=sampling(stop=["s" * 2000])), "sampling.stop"),
        (worker_pb2.GenerateRequest(text="a", sampling=sampling(stop=["s"] * 100)), "sampling.stop"),
        (worker_pb2.GenerateRequest(text="a", sampling=sampling(stop_token_ids=b"123")), "sampling.stop_token_ids"),
        (
            worker_pb2.GenerateRequest(text="a", sampling=sampling(stop_token_ids=ids(99).ids)),
            "sampling.stop_token_ids",
        ),
        (worker_pb2.GenerateRequest(text="a", sampling=sampling(logprobs=1000)), "sampling.logprobs"),
        (worker_pb2.GenerateRequest(text="a", sampling=sampling(logprobs=2**32 - 1)), "sampling.logprobs"),
        (worker_pb2.GenerateRequest(text="a", sampling=sampling(temperature=float("inf"))), "sampling.temperature"),
        (worker_pb2.GenerateRequest(text="a", sampling=sampling(top_p=NAN)), "sampling.top_p"),
        (worker_pb2.GenerateRequest(text="a", sampling=sampling(min_p=NAN)), "sampling.min_p"),
        (
            worker_pb2.GenerateRequest(text="a", sampling=sampling(repetition_penalty=1e30)),
            "sampling.repetition_penalty",
        ),
        (
            worker_pb2.GenerateRequest(text="a", sampling=sampling(stop_token_ids=ids(*[1] * 1025).ids)),
            "sampling.stop_token_ids",
        ),
    ],
)
async def test_bad_input_is_named_and_changes_nothing(request_: worker_pb2.GenerateRequest, named: str) -> None:
    async with serving() as place:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await place.generate(request_)
        assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert (error.value.details() or "").startswith(f"{named}:")
        assert place.harness.engine.scheduler.num_unfinished == 0
        assert (await place.generate(worker_pb2.GenerateRequest(text="ab")))[-1].finish_reason


@pytest.mark.parametrize("top_k", [VOCAB, 2**31 - 1, 2**31, 2**32 - 1])
async def test_a_top_k_of_the_vocabulary_or_more_is_off(top_k: int) -> None:
    async with serving() as place:
        seen: list[int] = []
        place.harness.runner.fail_when = lambda batch: bool(seen.extend(e.sampling.top_k for e in batch.sampled))
        await place.generate(worker_pb2.GenerateRequest(text="abc", sampling=sampling(top_k=top_k, temperature=1)))
        assert set(seen) == {0}


@pytest.mark.parametrize("method", ["Generate", "Tokenize", "Describe", "Drain"])
async def test_bytes_that_are_no_message_are_an_invalid_argument(method: str) -> None:
    async with serving() as place:
        path = f"/stemcache.v1.{'WorkerAdmin' if method == 'Drain' else 'ModelWorker'}/{method}"
        with pytest.raises(grpc.aio.AioRpcError) as error:
            if method == "Generate":
                _ = [item async for item in place.channel.unary_stream(path)(b"\xff\xff\xff\xff", timeout=20)]
            else:
                await place.channel.unary_unary(path)(b"\xff\xff\xff\xff", timeout=20)
        assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_full_queue_is_resource_exhausted() -> None:
    async with serving(max_waiting=1) as place:
        await place.harness.engine.connected.wait()
        place.harness.runner.gate = threading.Event()
        request = worker_pb2.GenerateRequest(token_ids=ids(*range(10)), sampling=sampling(max_tokens=1))
        running = asyncio.create_task(place.generate(request))
        await asyncio.to_thread(place.harness.runner.entered.wait, 20)
        held = asyncio.create_task(place.generate(request))  # waits for its sibling's prefix
        while place.harness.engine.scheduler.num_waiting == 0:
            await asyncio.sleep(0.001)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await place.generate(request)
        assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        place.harness.runner.gate.set()
        assert (await running)[-1].usage.computed_tokens == 10
        assert (await held)[-1].usage.cached_tokens == 8


async def test_a_cancelled_call_frees_what_it_holds() -> None:
    async with serving() as place:
        call = place.stub.Generate(worker_pb2.GenerateRequest(text="abcdefgh", sampling=sampling(max_tokens=150)))
        await call.read()
        call.cancel()
        await place.harness.settled()


@pytest.mark.parametrize("by_client", [True, False])
async def test_a_deadline_frees_what_the_call_holds(by_client: bool) -> None:
    async with serving(request_timeout_s=20 if by_client else 0.2) as place:
        await place.harness.engine.connected.wait()
        place.harness.runner.gate = threading.Event()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            request = worker_pb2.GenerateRequest(text="abcdefgh")
            _ = [item async for item in place.stub.Generate(request, timeout=0.2 if by_client else 20)]
        assert error.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        place.harness.runner.gate.set()
        await place.harness.settled()


async def test_a_failed_forward_pass_is_internal() -> None:
    async with serving() as place:
        place.harness.runner.fail_when = lambda batch: True
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
        place.harness.cache.on_step = lambda step: seen.extend(
            (a.namespace.model, a.namespace.salt) for a in step.acquires
        )
        await place.generate(worker_pb2.GenerateRequest(text="abc", salt="tenant"))
        assert seen == [("digest", "tenant")]


async def test_describe_tells_what_the_worker_is_and_does() -> None:
    async with serving() as place:
        await place.harness.engine.connected.wait()
        response = await place.stub.Describe(worker_pb2.DescribeRequest(), timeout=20)
        assert (response.worker_id, response.model_type, response.namespace.model) == ("w", "Toy", "digest")
        assert (response.page_tokens, response.max_model_len, response.vocab_size) == (PAGE, MAX_MODEL_LEN, VOCAB)
        assert (response.num_running, response.num_waiting, response.draining) == (0, 0, False)
        assert response.cache_epoch == "epoch-1"
        assert response.groups[0].name == "full"
        assert dict(response.config) == {"redis_url": "***"}


async def test_drain_answers_when_everything_has_finished_and_then_nothing_is_taken() -> None:
    async with serving() as place:
        place.harness.runner.gate = threading.Event()
        running = asyncio.create_task(place.generate(worker_pb2.GenerateRequest(text="abc")))
        await asyncio.to_thread(place.harness.runner.entered.wait, 20)
        draining = asyncio.ensure_future(place.admin.Drain(worker_pb2.DrainRequest(), timeout=20))
        while not place.harness.engine.draining.is_set():
            await asyncio.sleep(0.001)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await place.generate(worker_pb2.GenerateRequest(text="abc"))
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE
        place.harness.runner.gate.set()
        response = await draining
        assert (response.num_finished, response.num_aborted) == (1, 0)
        assert place.drained.is_set()
        assert (await running)[-1].finish_reason


async def test_a_drain_goes_on_without_its_caller() -> None:
    async with serving() as place:
        place.harness.runner.gate = threading.Event()
        running = asyncio.create_task(place.generate(worker_pb2.GenerateRequest(text="abc")))
        await asyncio.to_thread(place.harness.runner.entered.wait, 20)
        draining = place.admin.Drain(worker_pb2.DrainRequest(), timeout=20)
        while not place.harness.engine.draining.is_set():
            await asyncio.sleep(0.001)
        draining.cancel()
        assert not place.drained.is_set()
        place.harness.runner.gate.set()
        assert (await running)[-1].finish_reason
        await asyncio.wait_for(place.drained.wait(), 20)


async def test_a_stop_string_ends_the_stream() -> None:
    async with serving() as place:
        text = Letters().add(reference([0, 1, 2], 20))
        request = worker_pb2.GenerateRequest(text="abc", sampling=sampling(max_tokens=20, stop=[text[6:9]]))
        responses = await place.generate(request)
        assert "".join(response.text for response in responses) == text[: text.index(text[6:9])]
        assert responses[-1].finish_reason == worker_pb2.FINISH_REASON_STOP


@pytest.mark.parametrize("shown", [False, True])
async def test_the_text_of_a_stop_token_is_left_out_unless_wanted(shown: bool) -> None:
    async with serving() as place:
        tokens = reference([0, 1, 2], 20)
        last = next(at for at in range(3, 20) if tokens[at] not in tokens[:at])
        wanted = sampling(max_tokens=20, stop_token_ids=ids(tokens[last]).ids, include_stop_token_text=shown)
        responses = await place.generate(worker_pb2.GenerateRequest(text="abc", sampling=wanted))
        assert array("i", b"".join(response.token_ids for response in responses)).tolist() == tokens[: last + 1]
        assert "".join(response.text for response in responses) == Letters().add(tokens[: last + shown])
        assert responses[-1].finish_reason == worker_pb2.FINISH_REASON_STOP
        assert responses[-1].usage.generated_tokens == last + 1


@pytest.mark.parametrize(("no_special_tokens", "length"), [(False, 4), (True, 3)])
async def test_special_tokens_are_added_unless_the_prompt_has_them(no_special_tokens: bool, length: int) -> None:
    async with serving() as place:
        place.tokenizer.doubles_first = True
        request = worker_pb2.GenerateRequest(text="abc", no_special_tokens=no_special_tokens)
        assert (await place.generate(request))[-1].usage.prompt_tokens == length
        tokenize = worker_pb2.TokenizeRequest(text="abc", no_special_tokens=no_special_tokens)
        assert len((await place.stub.Tokenize(tokenize, timeout=20)).token_ids) == 4 * length


async def test_a_text_is_not_read_for_a_request_that_is_refused_anyway() -> None:
    async with serving() as place:
        read: list[str] = []
        place.tokenizer.encode = lambda text, **_: read.append(text) or [0]  # type: ignore[method-assign, assignment]
        for request, code in (
            (worker_pb2.GenerateRequest(text="abc", sampling=sampling(top_p=2)), grpc.StatusCode.INVALID_ARGUMENT),
            (worker_pb2.GenerateRequest(text="abc", adapter="lora"), grpc.StatusCode.INVALID_ARGUMENT),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await place.generate(request)
            assert error.value.code() == code
        place.harness.engine.draining.set()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await place.generate(worker_pb2.GenerateRequest(text="abc"))
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE
        assert not read


async def test_usage_tells_what_was_matched_and_why_no_more_was_reused() -> None:
    async with serving() as place:
        prompt = "abcdefghij"
        await place.generate(worker_pb2.GenerateRequest(text=prompt))
        second = (await place.generate(worker_pb2.GenerateRequest(text=prompt)))[-1].usage
        assert (second.matched_tokens, second.usable_tokens, second.limiting_group) == (8, 8, "")
        assert second.miss_reason == types_pb2.MISS_REASON_PAGE_TAIL
    told = Usage(10, 4, 0, 6, 1, 0, matched_tokens=9, usable_tokens=4, limiting_group="window", miss_reason=6)
    encoded = encode_usage(told, Timing(0.5, 0.25))
    assert (encoded.matched_tokens, encoded.usable_tokens, encoded.limiting_group) == (9, 4, "window")
    assert encoded.miss_reason == types_pb2.MISS_REASON_WINDOW_GONE


async def test_a_request_that_bypasses_the_cache_reuses_nothing_and_leaves_nothing() -> None:
    async with serving() as place:
        bypassing = worker_pb2.GenerateRequest(text="abcdefghij", bypass_cache=True)
        other = worker_pb2.GenerateRequest(text="abcdefghij")
        requests = (bypassing, other, bypassing, other)
        assert [(await place.generate(request))[-1].usage.cached_tokens for request in requests] == [0, 0, 0, 8]


def test_every_error_of_a_request_has_the_status_that_the_tree_names() -> None:
    lines = (errors.__doc__ or "").splitlines()
    for kind in errors.RequestError.__subclasses__():
        (line,) = (line for line in lines if f" {kind.__name__} " in line)
        assert line.split()[-1] == CODES[kind].name
