"""The commands that ask a running system: status, top, explain, pin, clear, generate.

Knows the protocol's questions; views.py shows the answers.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated, NoReturn

import grpc
import grpc.aio
import typer
from rich.live import Live

from cli.app import CacheOption, JsonOption, SaltOption, WorkerOption, app, find_cache, find_workers, run
from cli.client import Answer, StemcacheClient, to_dict
from cli.output import Output
from cli.views import counts_line, explanation_view, live_view, stats_view, words
from protos.v1 import cache_pb2, types_pb2, worker_pb2

TOKEN_BYTES = 4

PromptArgument = Annotated[str, typer.Argument(help="Prompt text; - reads it from stdin.")]


@app.command()
def status(cache: CacheOption = "", json_: JsonOption = False) -> None:
    """Workers, pools, hit rates and the host tier, once."""
    output = Output(as_json=json_)

    async def ask() -> cache_pb2.StatsResponse:
        async with StemcacheClient(find_cache(cache), ()) as client:
            return await client.stats()

    stats = run(ask())
    output.show(stats_view(stats))
    output.emit(to_dict(stats))


@app.command()
def top(
    cache: CacheOption = "",
    interval: Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between looks.")] = 1.0,
    json_: JsonOption = False,
) -> None:
    """The status, live, until Ctrl-C; with --json one look and the end."""
    if json_:
        status(cache, json_=True)
        return
    output = Output(as_json=False)

    async def watch() -> None:
        async with StemcacheClient(find_cache(cache), ()) as client:
            stats = await client.stats()
            if not output.console.is_terminal:
                await _print_looks(client, stats, interval, output)
            with Live(console=output.console, screen=True, auto_refresh=False) as live:
                while True:
                    live.update(live_view(stats, output.console), refresh=True)
                    await asyncio.sleep(interval)
                    stats = await _next_look(client, stats)

    run(watch())


async def _print_looks(
    client: StemcacheClient, stats: cache_pb2.StatsResponse, interval: float, output: Output
) -> NoReturn:
    """For a pipe or a file: one whole status after the other."""
    while True:
        output.show(stats_view(stats))
        await asyncio.sleep(interval)
        stats = await _next_look(client, stats)


async def _next_look(client: StemcacheClient, last: cache_pb2.StatsResponse) -> cache_pb2.StatsResponse:
    """The last look again while the cache service is away: it may be starting again."""
    try:
        return await client.stats()
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.UNAVAILABLE:
            raise
        for worker in last.workers:
            worker.connected = False
        return last


@app.command()
def explain(
    prompt: PromptArgument,
    cache: CacheOption = "",
    worker: WorkerOption = "",
    salt: SaltOption = "",
    json_: JsonOption = False,
) -> None:
    """What of a prompt is cached where, and why the rest is not."""
    output = Output(as_json=json_)

    text = _text(prompt)

    async def ask() -> tuple[int, cache_pb2.ExplainResponse]:
        async with StemcacheClient(find_cache(cache), find_workers(worker)) as client:
            tokenized = await client.tokenize(await client.healthy_worker(), text, salt)
            num_tokens = len(tokenized.token_ids) // TOKEN_BYTES
            return num_tokens, await client.explain(tokenized.namespace, tokenized.token_ids)

    num_tokens, explained = run(ask())
    output.show(explanation_view(num_tokens, explained))
    output.emit({"prompt_tokens": num_tokens, **to_dict(explained)})


@app.command()
def pin(
    prompt: PromptArgument,
    ttl: Annotated[float, typer.Option("--ttl", min=0.0, help="Seconds; 0 unpins.")] = 3600.0,
    cache: CacheOption = "",
    worker: WorkerOption = "",
    salt: SaltOption = "",
    json_: JsonOption = False,
) -> None:
    """Rank a cached prefix last for eviction, for a while."""
    output = Output(as_json=json_)

    text = _text(prompt)

    async def ask() -> cache_pb2.PinResponse:
        async with StemcacheClient(find_cache(cache), find_workers(worker)) as client:
            tokenized = await client.tokenize(await client.healthy_worker(), text, salt)
            return await client.pin(tokenized.namespace, tokenized.token_ids, int(ttl * 1000))

    response = run(ask())
    output.show(f"{response.pinned_tokens:,} cached tokens are {'pinned' if ttl else 'unpinned'}")
    output.emit(to_dict(response))


@app.command()
def clear(
    unused: Annotated[bool, typer.Option("--unused", help="Drop only what nobody holds.")] = False,
    salt: Annotated[str | None, typer.Option("--salt", help="Only this tenant's namespace; default: all.")] = None,
    cache: CacheOption = "",
    worker: WorkerOption = "",
    json_: JsonOption = False,
) -> None:
    """Drop cached prefixes; refused while live sequences hold some, unless --unused is given."""
    output = Output(as_json=json_)

    async def ask() -> cache_pb2.ClearResponse:
        workers = find_workers(worker) if salt is not None else ()
        async with StemcacheClient(find_cache(cache), workers) as client:
            namespace: types_pb2.Namespace | None = None
            if salt is not None:
                namespace = (await client.tokenize(await client.healthy_worker(), "", salt)).namespace
            return await client.clear(namespace, unused_only=unused)

    response = run(ask())
    output.show(f"dropped {response.num_pages:,} pages and {response.num_host_rows:,} rows of the host tier")
    output.emit(to_dict(response))


@app.command()
def generate(
    prompt: PromptArgument,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1)] = 64,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0)] = 0.0,
    seed: Annotated[int | None, typer.Option("--seed", help="Makes sampling repeatable.")] = None,
    worker: WorkerOption = "",
    salt: SaltOption = "",
    json_: JsonOption = False,
) -> None:
    """Generate from a prompt, and say how much of it was cached."""
    output = Output(as_json=json_)
    sampling = worker_pb2.SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    shown = 0

    def stream(answer: Answer) -> None:
        nonlocal shown
        if not json_:
            sys.stdout.write(answer.text[shown:])
            sys.stdout.flush()
            shown = len(answer.text)

    text = _text(prompt)

    async def ask() -> Answer:
        async with StemcacheClient("", find_workers(worker)) as client:
            return await client.generate(await client.healthy_worker(), text, sampling, salt=salt, on_answer=stream)

    answer = run(ask())
    output.show("\n" + counts_line(answer))
    output.emit(
        {
            "worker": answer.worker,
            "text": answer.text,
            "token_ids": answer.token_ids,
            "finish_reason": words(worker_pb2.FinishReason.Name(answer.finish_reason), "FINISH_REASON_"),
            "first_token_s": answer.first_token_s,
            "usage": to_dict(answer.usage),
        }
    )


def _text(prompt: str) -> str:
    return sys.stdin.read() if prompt == "-" else prompt
