"""`stemcache drain`: a worker finishes what runs, takes nothing new, and ends."""

from __future__ import annotations

from typing import Annotated

import typer

from cli.app import JsonOption, app, number, run
from cli.message_json import to_dict
from cli.output import Output
from cli.places import find_worker_admin
from protos.v1 import worker_pb2, worker_pb2_grpc
from rpc.client import open_channel
from session.limits import MAX_MESSAGE_BYTES

# The reply comes when the last request has ended.
MAX_TIMEOUT_S = 86_400.0
ANSWER_S = 60.0
DEFAULT_DRAIN_S = 3600.0


@app.command()
def drain(
    worker: Annotated[str, typer.Argument(help="worker-1, or a worker's admin address (host:port).")],
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout", min=0.0, max=MAX_TIMEOUT_S, callback=number, help="Seconds for what runs; 0: the worker's own."
        ),
    ] = 0.0,
    json_: JsonOption = False,
) -> None:
    """Let a worker finish its requests and end; under `stemcache up` it then starts anew."""
    output = Output(as_json=json_)

    async def ask() -> worker_pb2.DrainResponse:
        async with open_channel(find_worker_admin(worker), MAX_MESSAGE_BYTES) as channel:
            stub: worker_pb2_grpc.WorkerAdminAsyncStub = worker_pb2_grpc.WorkerAdminStub(channel)
            request = worker_pb2.DrainRequest(timeout_ms=int(timeout * 1000))
            return await stub.Drain(request, timeout=(timeout or DEFAULT_DRAIN_S) + ANSWER_S)

    with output.working(f"waiting for {worker} to finish"):
        response = run(ask())
    output.show(f"{worker} has finished {response.num_finished:,} requests and aborted {response.num_aborted:,}")
    output.emit(to_dict(response))
