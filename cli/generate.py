"""`stemcache generate`: one request, streamed, and how much of its prompt was cached.

routing.py picks the worker.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from cli.app import JsonOption, PromptArgument, SaltOption, WorkerOption, app, number, run
from cli.client import Answer
from cli.message_json import to_dict
from cli.output import Output
from cli.routing import generate_where_cached
from cli.views import counts_line, words
from protos.v1 import worker_pb2

MAX_UINT32 = 2**32 - 1
MAX_UINT64 = 2**64 - 1
MAX_TEMPERATURE = 1e6


@app.command()
def generate(
    prompt: PromptArgument,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, max=MAX_UINT32)] = 64,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, max=MAX_TEMPERATURE, callback=number)] = 0.0,
    seed: Annotated[
        int | None, typer.Option("--seed", min=0, max=MAX_UINT64, help="Makes sampling repeatable.")
    ] = None,
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

    answer = run(generate_where_cached(worker, prompt, sampling, salt, stream))
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
