"""What all commands share: the typer app, its common options, and finding the services.

Knows no command.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from importlib.metadata import version
from typing import Annotated, Any, NoReturn, TypeVar

import grpc
import grpc.aio
import typer
from typer.core import TyperGroup

from cli.output import Output, plain, stderr
from cli.run_file import read_record
from rpc.address import parse_address

T = TypeVar("T")

# As a person needs them.
ORDER = (
    "up",
    "down",
    "demo",
    "eval",
    "ask",
    "generate",
    "status",
    "top",
    "explain",
    "pin",
    "clear",
    "replay",
    "doctor",
)


class _Commands(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=ORDER.index)


app = typer.Typer(
    name="stemcache",
    cls=_Commands,
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


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"stemcache {version('stemcache')}")
        raise typer.Exit


@app.callback()
def common(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """A prefix cache for LLM serving: start it, ask it, explain it."""


def fail(message: str) -> NoReturn:
    """One clear line on stderr and exit code 1; stdout stays empty, with --json too."""
    stderr.print(f"[red]error:[/red] {plain(message)}", soft_wrap=True)
    raise typer.Exit(1)


def check_choice(option: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise typer.BadParameter(f"must be one of {', '.join(choices)}, not {value!r}", param_hint=option)


def check_address(option: str, address: str) -> str:
    try:
        parse_address(address)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None
    return address


def find_cache(given: str) -> str:
    """The given address, else the running one's; ends the command when there is none."""
    if given:
        return check_address("--cache", given)
    record = read_record()
    if record is None:
        fail("no cache service is running here; start one with `stemcache up`, or name it with --cache host:port")
    return record.cache


def find_workers(given: str) -> tuple[str, ...]:
    """The given address alone, else those of all running workers; ends the command when there are none."""
    if given:
        return (check_address("--worker", given),)
    record = read_record()
    if record is None:
        fail("no worker is running here; start some with `stemcache up`, or name one with --worker host:port")
    return record.workers


def run(command: Coroutine[Any, Any, T]) -> T:
    """Run a command's coroutine; a refusal of a service becomes one clear line and exit code 1."""
    try:
        return asyncio.run(command)
    except grpc.aio.AioRpcError as error:
        advice = "; `stemcache doctor` looks for the cause" if error.code() is grpc.StatusCode.UNAVAILABLE else ""
        fail(f"{error.code().name}: {error.details()}{advice}")
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


__all__ = [
    "CacheOption",
    "JsonOption",
    "Output",
    "SaltOption",
    "WorkerOption",
    "app",
    "check_address",
    "check_choice",
    "fail",
    "find_cache",
    "find_workers",
    "run",
]
