"""What all commands share: the typer app, its common options, and how a refusal is shown."""

from __future__ import annotations

import asyncio
import math
import string
import sys
from collections.abc import Collection, Coroutine
from importlib.metadata import version
from typing import Annotated, Any, NoReturn, TypeVar

import grpc
import grpc.aio
import typer
from typer.core import TyperGroup

from cli.client import WrongService
from cli.output import plain, stderr
from session.words import HASH_BYTES

T = TypeVar("T")

PAGE_ID_DIGITS = 2 * HASH_BYTES

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
    "drain",
    "replay",
    "models",
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
    context_settings={"help_option_names": ["-h", "--help"]},
)


def utf8(text: str | None) -> str | None:
    """Returns the text. Raises BadParameter for bytes that are not UTF-8, which Python keeps as surrogates."""
    try:
        return text and text.encode().decode()
    except UnicodeEncodeError:
        raise typer.BadParameter("is not UTF-8") from None


def hex_ids(text: str) -> str:
    """Returns ids of 64 hexadecimal digits, between commas or spaces, as one string; for - those of stdin."""
    ids = (prompt_text(text) or "").replace(",", " ").split()
    for one in ids:
        if len(one) != PAGE_ID_DIGITS or set(one) - set(string.hexdigits):
            raise typer.BadParameter(f"{one[:70]!r} is no id of {PAGE_ID_DIGITS} hexadecimal digits")
    if text and not ids:
        raise typer.BadParameter("has no id")
    return "".join(ids)


def prompt_text(prompt: str) -> str | None:
    """Returns the argument, or for - the content of stdin."""
    if prompt != "-":
        return utf8(prompt)
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"stdin is not UTF-8 (byte {error.start})") from None


def number(value: float) -> float:
    """Returns the value. Raises BadParameter for "nan" and infinities, which pass a check of a range."""
    if not math.isfinite(value):
        raise typer.BadParameter("is not a number")
    return value


JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on stdout; progress on stderr.")]
CacheOption = Annotated[
    str,
    typer.Option(
        "--cache", help="Address of the cache service; default: $STEMCACHE_CACHE, else that of `stemcache up`."
    ),
]
AdminOption = Annotated[
    str,
    typer.Option(
        "--admin", help="Admin address of the cache service; default: $STEMCACHE_ADMIN, else that of `stemcache up`."
    ),
]
WorkerOption = Annotated[
    str,
    typer.Option("--worker", help="Address of a worker; default: those of $STEMCACHE_WORKERS, else of `stemcache up`."),
]
SaltOption = Annotated[
    str, typer.Option("--salt", callback=utf8, help="Tenant salt; requests with different salts share nothing.")
]
PromptArgument = Annotated[str, typer.Argument(callback=prompt_text, help="Prompt text; - reads it from stdin.")]


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
    """Ends the command with a line on stderr and exit code 1; stdout stays empty, with --json too."""
    stderr.print(f"[red]error:[/red] {plain(message)}", soft_wrap=True)
    raise typer.Exit(1)


def check_choice(option: str, value: str, choices: Collection[str]) -> None:
    if value not in choices:
        raise typer.BadParameter(f"must be one of {', '.join(choices)}, not {value!r}", param_hint=option)


def run(command: Coroutine[Any, Any, T]) -> T:
    """Runs a command's coroutine; a service's refusal becomes a line on stderr and exit code 1."""
    try:
        return asyncio.run(command)
    except WrongService as error:
        fail(str(error))
    except grpc.aio.AioRpcError as error:
        advice = "; `stemcache doctor` looks for the cause" if error.code() is grpc.StatusCode.UNAVAILABLE else ""
        fail(f"{error.code().name}: {error.details()}{advice}")
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
