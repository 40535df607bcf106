"""The commands about single prefixes: explain, pin, clear.

explanation.py formats what Explain tells of prompts, engine_explanation.py what it tells of attached engines.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from cli.app import (
    AdminOption,
    CacheOption,
    JsonOption,
    PromptArgument,
    SaltOption,
    WorkerOption,
    app,
    fail,
    hex_ids,
    number,
    run,
    utf8,
)
from cli.client import StemcacheClient
from cli.engine_explanation import engines_explained
from cli.explanation import explanation_view, span
from cli.message_json import to_dict
from cli.output import Output
from cli.places import find_admin, find_cache, find_workers
from protos.v1 import cache_pb2, types_pb2

TOKEN_BYTES = 4
# Beyond what the service takes (max_pin_ms), and within 64 bits.
MAX_TTL_S = 1e9
MAX_UINT64 = (1 << 64) - 1


@app.command()
def explain(
    prompt: PromptArgument = "",
    attachment: Annotated[
        int | None,
        typer.Option(
            "--attachment",
            min=1,
            max=MAX_UINT64,
            help="An attached engine, by its number in `status`; without --page-ids its last lookup that missed.",
        ),
    ] = None,
    page_ids: Annotated[
        str,
        typer.Option(
            "--page-ids",
            callback=hex_ids,
            help="Not a prompt but pages of attached engines: ids of 64 hexadecimal digits; - reads them from stdin.",
        ),
    ] = "",
    cache: CacheOption = "",
    worker: WorkerOption = "",
    salt: SaltOption = "",
    adapter: Annotated[str, typer.Option("--adapter", callback=utf8, help="Of --page-ids: the LoRA adapter.")] = "",
    json_: JsonOption = False,
) -> None:
    """What of a prompt is cached where, and why the rest is not; or why an attached engine finds no pages."""
    output = Output(as_json=json_)
    if not page_ids and (adapter or (attachment and salt)):
        raise typer.BadParameter("goes with --page-ids: a lookup has its own", param_hint="--salt, --adapter")
    if attachment or page_ids:
        if prompt or worker:
            raise typer.BadParameter("goes with neither --attachment nor --page-ids", param_hint="PROMPT, --worker")
        _explain_pages(output, cache, attachment or 0, bytes.fromhex(page_ids), salt, adapter)
        return
    if not prompt:
        raise typer.BadParameter("give a prompt, --attachment or --page-ids", param_hint="PROMPT")
    _explain_prompt(output, cache, worker, prompt, salt)


def _explain_prompt(output: Output, cache: str, worker: str, prompt: str, salt: str) -> None:
    async def ask() -> tuple[int, cache_pb2.ExplainResponse]:
        async with StemcacheClient(find_cache(cache), find_workers(worker)) as client:
            tokenized = await client.tokenize(await client.healthy_worker(), prompt, salt)
            num_tokens = len(tokenized.token_ids) // TOKEN_BYTES
            return num_tokens, await client.explain(tokenized.namespace, tokenized.token_ids)

    num_tokens, explained = run(ask())
    output.show(explanation_view(num_tokens, explained))
    output.emit({"prompt_tokens": num_tokens, **to_dict(explained)})


def _explain_pages(output: Output, cache: str, attachment: int, page_ids: bytes, salt: str, adapter: str) -> None:
    async def ask() -> cache_pb2.ExplainResponse:
        async with StemcacheClient(find_cache(cache), ()) as client:
            return await client.explain_pages(attachment, page_ids, salt, adapter)

    explained = run(ask())
    output.show(engines_explained(explained.attachments))
    output.emit(to_dict(explained))


@app.command()
def pin(
    prompt: PromptArgument,
    ttl: Annotated[
        float, typer.Option("--ttl", min=0.0, max=MAX_TTL_S, callback=number, help="Seconds; 0 unpins.")
    ] = 3600.0,
    admin: AdminOption = "",
    worker: WorkerOption = "",
    salt: SaltOption = "",
    json_: JsonOption = False,
) -> None:
    """Evict a cached prefix last, for a while; exit code 1 when nothing of it is cached."""
    output = Output(as_json=json_)

    async def ask() -> cache_pb2.PinResponse:
        async with StemcacheClient("", find_workers(worker), find_admin(admin)) as client:
            tokenized = await client.tokenize(await client.healthy_worker(), prompt, salt)
            return await client.pin(tokenized.namespace, tokenized.token_ids, int(ttl * 1000))

    response = run(ask())
    if response.pinned_tokens:
        output.show(f"{response.pinned_tokens:,} cached tokens are {f'pinned for {span(ttl)}' if ttl else 'unpinned'}")
    else:
        output.show("nothing is pinned: no whole page of this prompt is cached; `explain` says why")
    output.emit(to_dict(response))
    if ttl and not response.pinned_tokens:
        raise typer.Exit(1)


@app.command()
def clear(
    unused: Annotated[bool, typer.Option("--unused", help="Drop only what no live sequence holds.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count what would be dropped; drop nothing.")] = False,
    salt: Annotated[
        str | None, typer.Option("--salt", callback=utf8, help="Only this tenant's namespace; default: all tenants'.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Drop what all tenants have cached without asking.")] = False,
    admin: AdminOption = "",
    worker: WorkerOption = "",
    json_: JsonOption = False,
) -> None:
    """Drop cached prefixes, pinned ones too; refused while live sequences hold some, unless --unused is given.

    Without --salt it asks first, since it takes what all tenants have cached.
    """
    output = Output(as_json=json_)

    async def ask(dry_run: bool) -> cache_pb2.ClearResponse:
        workers = find_workers(worker) if salt is not None else ()
        async with StemcacheClient("", workers, find_admin(admin)) as client:
            namespace: types_pb2.Namespace | None = None
            if salt is not None:
                namespace = (await client.tokenize(await client.healthy_worker(), "", salt)).namespace
            return await client.clear(namespace, unused_only=unused, dry_run=dry_run)

    if salt is None and not yes and not dry_run:
        _confirm(run(ask(dry_run=True)))
    response = run(ask(dry_run))
    output.show(f"{'would drop' if dry_run else 'dropped'} {_counts(response, 'are' if dry_run else 'were')}")
    output.emit(to_dict(response))


def _confirm(response: cache_pb2.ClearResponse) -> None:
    """Asks at a terminal. Ends the command with exit code 1 after a no, and where nobody can be asked."""
    counts = _counts(response, "are")
    if not sys.stdin.isatty():
        fail(f"this would drop {counts}, of all tenants: say --yes, or name one tenant with --salt")
    if not typer.confirm(f"Drop {counts}, of all tenants?", err=True):
        fail("nothing was dropped")


def _counts(response: cache_pb2.ClearResponse, verb: str) -> str:
    counts = f"{response.num_pages:,} pages and {response.num_host_rows:,} rows of the host tier"
    pins = f"; {response.num_pinned_pages:,} of the pages {verb} pinned"
    away = (
        f"; {response.num_unconfirmed_workers} workers have yet to confirm it: if this service ends first, clear again"
    )
    return f"{counts}{pins if response.num_pinned_pages else ''}{away if response.num_unconfirmed_workers else ''}"
