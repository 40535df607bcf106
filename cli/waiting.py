"""Waits for what happens beside the requests: pages that reach the host tier, a worker that is started again."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence

from cli.client import StemcacheClient
from cli.supervisor import Child

SPILL_WAIT_S = 60.0
PAUSE_S = 0.05


async def wait_restarted(client: StemcacheClient, worker: str, child: Child, restarts: int) -> None:
    """Waits until the child was restarted more than `restarts` times and serves on this client's own channel.

    Has no timeout of its own.
    """
    while True:
        if child.restarts > restarts and await client.is_serving(worker):
            return
        await asyncio.sleep(PAUSE_S)


async def wait_running(client: StemcacheClient, worker: str, *, idle: bool = False) -> None:
    """Waits until the worker holds pages for a request, or with `idle` for none. Has no timeout."""
    while True:
        if bool((await client.describe(worker)).num_running) != idle:
            return
        await asyncio.sleep(PAUSE_S)


async def wait_for_host_tokens(
    client: StemcacheClient, reader: str, prompt: Sequence[int], wanted: int, salt: str = ""
) -> int:
    """Returns how many of the prompt's tokens `reader` could have, once background spills have ended or time is up.

    A reader that never computed the prompt itself has them from the host tier alone.
    """
    namespace = (await client.tokenize(reader, "", salt)).namespace
    tokens = array("i", prompt).tobytes()
    deadline = asyncio.get_running_loop().time() + SPILL_WAIT_S
    while True:
        response = await client.match(namespace, tokens)
        found = max(
            (w.match.usable_tokens + w.match.host_tokens for w in response.workers if w.endpoint == reader), default=0
        )
        if found >= wanted or asyncio.get_running_loop().time() > deadline:
            return found
        await asyncio.sleep(PAUSE_S)
