"""What all commands share: the typer app, its common options, and finding the services.

Knows no command.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Annotated, Any, NoReturn, TypeVar

import grpc.aio
import typer

from cli.output import Output, stderr
from cli.run_file import read_record

T = TypeVar("T")

app = typer.Typer(
    name="stemcache",
    help="A prefix cache for LLM serving: start it, ask it, explain it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on stdout; progress on stderr.")]
CacheOption = Annotated[
    str, typer.Option("--cache", help="Address of the cache service; default: the one that `stemcache up` runs.")
]
WorkerOption = Annotated[
    str, typer.Option("--worker", help="Address of a worker; default: the first one that `stemcache up` runs.")
]
SaltOption = Annotated[str, typer.Option("--salt", help="Tenant salt; requests with different salts share nothing.")]


def fail(message: str) -> NoReturn:
    stderr.print(f"[red]error:[/red] {message}")
    raise typer.Exit(1)


def find_cache(given: str) -> str:
    """The given address, else the running one's; ends the command when there is none."""
    if given:
        return given
    record = read_record()
    if record is None:
        fail("no cache service is running here; start one with `stemcache up`, or name it with --cache host:port")
    return record.cache


def find_workers(given: str) -> tuple[str, ...]:
    if given:
        return (given,)
    record = read_record()
    if record is None:
        fail("no worker is running here; start some with `stemcache up`, or name one with --worker host:port")
    return record.workers


def run(command: Coroutine[Any, Any, T]) -> T:
    """Run a command's coroutine; a refusal of a service becomes one clear line and exit code 1."""
    try:
        return asyncio.run(command)
    except grpc.aio.AioRpcError as error:
        fail(f"{error.code().name}: {error.details()}")
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


__all__ = [
    "CacheOption",
    "JsonOption",
    "Output",
    "SaltOption",
    "WorkerOption",
    "app",
    "fail",
    "find_cache",
    "find_workers",
    "run",
]
