"""What a caller may ask of an answer, through a real worker: seeds, log-probabilities, stops, penalties, lengths."""

from __future__ import annotations

import asyncio
from array import array
from typing import Any

import pytest

from protos.v1 import worker_pb2
from tests.e2e.client import Client
from tests.e2e.conftest import Cluster, Starter
from tests.e2e.running import Draw


async def ask(
    client: Client, worker: str, prompt: list[int], **sampling: Any
) -> tuple[list[int], str, list[worker_pb2.GenerateResponse]]:
    request = worker_pb2.GenerateRequest(
        token_ids=worker_pb2.TokenIds(ids=array("i", prompt).tobytes()),
        sampling=worker_pb2.SamplingParams(**{"ignore_eos": True, **sampling}),
    )
    responses = [response async for response in client.worker(worker).Generate(request, timeout=60)]
    tokens = array("i", b"".join(response.token_ids for response in responses)).tolist()
    return tokens, "".join(response.text for response in responses), responses


async def test_a_seed_repeats_an_answer_anywhere_cold_or_cached_alone_or_in_company(
    client: Client, cluster: Cluster, draw: Draw
) -> None:
    prompt, (here, there) = draw(90), cluster.workers
    sampling = {"max_tokens": 30, "temperature": 0.9, "top_p": 0.95, "top_k": 50, "min_p": 0.01}
    cold, _, _ = await ask(client, here, prompt, seed=7, **sampling)
    crowd = await asyncio.gather(
        ask(client, here, prompt, seed=7, **sampling),
        *(ask(client, here, draw(50), seed=s, **sampling) for s in range(5)),
    )
    elsewhere, _, _ = await ask(client, there, prompt, seed=7, **sampling)
    assert crowd[0][0] == cold
    assert elsewhere == cold
    assert (await ask(client, here, prompt, seed=8, **sampling))[0] != cold
    unseeded = [(await ask(client, here, prompt, **sampling))[0] for _ in range(2)]
    assert unseeded[0] != unseeded[1]


async def test_log_probabilities_come_with_each_token(client: Client, cluster: Cluster, draw: Draw) -> None:
    tokens, _, responses = await ask(client, cluster.workers[0], draw(40), max_tokens=12, logprobs=3)
    entries = [entry for response in responses for entry in response.logprobs]
    assert len(entries) == len(tokens) == 12
    for token, entry in zip(tokens, entries, strict=True):
        ids = array("i", entry.top_ids).tolist()
        assert ids[0] == token, "greedy takes the likeliest"
        assert entry.top_logprobs[0] == entry.logprob <= 0
        assert list(entry.top_logprobs) == sorted(entry.top_logprobs, reverse=True)
        assert len(ids) == len(entry.top_logprobs) == 3


async def test_only_those_who_ask_get_log_probabilities(client: Client, cluster: Cluster, draw: Draw) -> None:
    worker, prompts = cluster.workers[0], [draw(40), draw(40)]
    with_them, without = await asyncio.gather(
        ask(client, worker, prompts[0], max_tokens=10, logprobs=0), ask(client, worker, prompts[1], max_tokens=10)
    )
    assert sum(len(response.logprobs) for response in with_them[2]) == 10
    assert not any(response.logprobs for response in without[2])


async def test_a_stop_string_ends_the_text_before_it(client: Client, cluster: Cluster, draw: Draw) -> None:
    prompt, worker = draw(50), cluster.workers[0]
    tokens, text, _ = await ask(client, worker, prompt, max_tokens=60)
    stop = text[20:24]
    stopped_tokens, stopped_text, responses = await ask(client, worker, prompt, max_tokens=60, stop=["\x00no", stop])
    assert stopped_text == text[: text.index(stop)]
    assert stopped_tokens == tokens[: len(stopped_tokens)]
    assert len(stopped_tokens) < len(tokens)
    assert responses[-1].finish_reason == worker_pb2.FINISH_REASON_STOP
    assert responses[-1].usage.generated_tokens == len(stopped_tokens)
    assert not any(stop in response.text for response in responses)
    await client.idle(cluster.cache)


async def test_a_stop_token_and_the_length_end_an_answer(client: Client, cluster: Cluster, draw: Draw) -> None:
    prompt, worker = draw(50), cluster.workers[0]
    tokens, _, whole = await ask(client, worker, prompt, max_tokens=40)
    assert whole[-1].finish_reason == worker_pb2.FINISH_REASON_LENGTH
    stop = tokens[25]
    stopped, _, responses = await ask(
        client, worker, prompt, max_tokens=40, stop_token_ids=array("i", [stop]).tobytes()
    )
    assert stopped == tokens[: tokens.index(stop) + 1]
    assert responses[-1].finish_reason == worker_pb2.FINISH_REASON_STOP


@pytest.mark.parametrize(
    "penalties", [{}, {"repetition_penalty": 1.8}, {"frequency_penalty": 2.0, "presence_penalty": 2.0}]
)
async def test_penalties_make_answers_vary(
    client: Client, cluster: Cluster, draw: Draw, penalties: dict[str, float]
) -> None:
    prompt, worker = draw(30), cluster.workers[1]
    tokens, _, _ = await ask(client, worker, prompt, max_tokens=60, **penalties)
    again, _, _ = await ask(client, worker, prompt, max_tokens=60, **penalties)
    plain, _, _ = await ask(client, worker, prompt, max_tokens=60)
    assert tokens == again
    assert (len(set(tokens)) > len(set(plain))) == bool(penalties)


async def test_the_longest_answer_ends_at_the_models_length(
    client: Client, cluster: Cluster, start: Starter, draw: Draw
) -> None:
    usual = await client.worker(cluster.workers[1]).Describe(worker_pb2.DescribeRequest(), timeout=20)
    assert usual.max_model_len == 16384, "what the model's config says"
    worker = start.workers(start.cache().address, max_model_len=500)[0].address
    assert (await client.worker(worker).Describe(worker_pb2.DescribeRequest(), timeout=20)).max_model_len == 500
    tokens, _, responses = await ask(client, worker, draw(500 - 3), max_tokens=50)
    assert len(tokens) == 3
    assert responses[-1].finish_reason == worker_pb2.FINISH_REASON_LENGTH
