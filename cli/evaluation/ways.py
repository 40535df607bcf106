"""The ways in which a request can get its prefix, each with counters that prove it.

Each way has salts of its own, so none finds the pages of another one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import zip_longest
from typing import NamedTuple

from cli.client import Answer, greedy
from cli.evaluation.result import LEAST_HIT_SHARE, Reply, WayResult
from cli.evaluation.services import SMALL_BUDGET, EvalServices, SpecialWorker, fresh_salt
from cli.evaluation.sheets import Asked, Sheet
from cli.supervisor import Child
from cli.waiting import wait_restarted, wait_running

RESTART_WAIT_S = 120.0
# The earlier request goes on for longer than its siblings' answers take; it is cancelled when they are there.
EARLIER_TOKENS = 400
# Tokens that the neighbour decodes, and how many of them fit before it needs a page of the asker's: a number for each
# attempt, since how far the asker has decoded by then is a matter of timing. Eight attempts with 4 to 12 tokens led to
# 73 of 100 preemptions on an H200, where a token takes a millisecond and asking takes several.
NEIGHBOUR_TOKENS = 24
NEIGHBOUR_LEADS = (6, 5, 7, 4, 9, 12, 15, 8, 18, 10, 13, 20)
ROUNDS_OF_LEADS = 2

Play = Callable[[EvalServices, WayResult], Awaitable[list[Reply]]]


class Way(NamedTuple):
    """The row's title, and the function that produces its replies."""

    title: str
    play: Play


async def cold(services: EvalServices, result: WayResult) -> list[Reply]:
    """Each question under a new salt, so nothing is reused."""

    async def one_sheet(worker: str, sheet: Sheet) -> list[Reply]:
        return [await services.ask(worker, sheet, asked, fresh_salt("cold"), reuses=False) for asked in sheet.asked]

    replies = await services.on_both(one_sheet)
    warm = sum(reply.answer.usage.computed_tokens != len(reply.asked.prompt) for reply in replies)
    result.expect(not warm, f"{warm} cold requests reused something")
    return replies


async def device(services: EvalServices, result: WayResult) -> list[Reply]:
    """Each register computed beforehand, on the worker that is asked."""
    salt = fresh_salt("device")

    async def one_sheet(worker: str, sheet: Sheet) -> list[Reply]:
        await services.prime(worker, sheet, salt)
        return [await services.ask(worker, sheet, asked, salt) for asked in sheet.asked]

    replies = await services.on_both(one_sheet)
    elsewhere = sum(reply.answer.usage.fetched_tokens > 0 for reply in replies)
    result.expect(not elsewhere, f"{elsewhere} requests fetched something")
    return replies


async def sibling(services: EvalServices, result: WayResult) -> list[Reply]:
    """All questions about a register at once, while an earlier request computes it, and goes on after that."""
    salt = fresh_salt("sibling")

    async def one_sheet(worker: str, sheet: Sheet) -> list[Reply]:
        earlier = asyncio.create_task(services.client.generate(worker, sheet.prefix, greedy(EARLIER_TOKENS), salt=salt))
        await wait_running(services.client, worker)
        replies = await asyncio.gather(*(services.ask(worker, sheet, asked, salt) for asked in sheet.asked))
        result.expect(not earlier.done(), "an earlier request ended before its siblings were answered")
        _add(result, "answered while an earlier request ran", 0 if earlier.done() else len(replies))
        earlier.cancel()
        await asyncio.gather(earlier, return_exceptions=True)
        await wait_running(services.client, worker, idle=True)
        return replies

    return await services.on_both(one_sheet)


async def fetched(services: EvalServices, result: WayResult) -> list[Reply]:
    """Computed and spilled by one worker, asked about on another, which has to fetch it for every question."""
    if not _has_shared_tier(services, result):
        return []
    salt, reader = fresh_salt("fetched"), await services.tight_worker()
    replies: list[Reply] = []
    for sheets in services.in_turn():
        for sheet in sheets:
            await services.spill(sheet, salt)
        # One question of each register in turn: the small pool has dropped a register when its next question comes.
        for column in zip_longest(*(sheet.asked for sheet in sheets)):
            for sheet, asked in zip(sheets, column, strict=True):
                if asked is not None:
                    replies.append(await services.ask(reader.address, sheet, asked, salt))
    _expect_fetched(result, replies)
    return replies


async def chunked(services: EvalServices, result: WayResult) -> list[Reply]:
    """Computed by a worker with a small token budget; what the first question's chunks left serves the others."""
    salt, worker = fresh_salt("chunked"), await services.chunking_worker()
    replies: list[Reply] = []
    for sheet in services.sheets:
        before = await worker.num_launches()
        first, *others = sheet.asked
        earlier = await services.ask(worker.address, sheet, first, salt, reuses=False)
        launches = await worker.num_launches() - before
        # Each launch behind the prompt's last one computed one token of the answer.
        chunks = launches - (earlier.answer.usage.generated_tokens - 1)
        _add(result, "chunks", chunks)
        least = -(-len(first.prompt) // SMALL_BUDGET)
        result.expect(chunks >= least, f"a prompt of {len(first.prompt)} tokens took {chunks} launches only")
        computed = earlier.answer.usage.computed_tokens
        result.expect(computed == len(first.prompt), f"the first request computed {computed} tokens only")
        replies += [earlier, *[await services.ask(worker.address, sheet, asked, salt) for asked in others]]
    return replies


async def preempted(services: EvalServices, result: WayResult) -> list[Reply]:
    """Each request loses its pages while it decodes, and resumes."""
    salt, worker = fresh_salt("preempted"), await services.tight_worker()
    replies: list[Reply] = []
    leads = list(NEIGHBOUR_LEADS)
    for sheet in services.sheets:
        await services.prime(worker.address, sheet, salt)
        for asked in sheet.asked:
            replies.append(await _ask_preempted(services, worker, sheet, asked, salt, leads))
    spared = sum(reply.answer.usage.num_preemptions == 0 for reply in replies)
    result.proof["preemptions"] = sum(reply.answer.usage.num_preemptions for reply in replies)
    result.expect(not spared, f"{spared} requests were never preempted")
    return replies


async def restarted(services: EvalServices, result: WayResult) -> list[Reply]:
    """Spilled, then the worker is killed; the restarted one fetches the pages."""
    if not _has_shared_tier(services, result):
        return []
    salt = fresh_salt("restarted")
    victim = services.supervisor.children[services.cluster.worker_names[0]]
    replies: list[Reply] = []
    for sheets in services.in_turn():
        for sheet in sheets:
            await services.spill(sheet, salt)
        await _restart(services, victim, result)
        for sheet in sheets:
            mine = [await services.ask(services.first, sheet, asked, salt) for asked in sheet.asked]
            _expect_fetched(result, mine[:1])
            replies += mine
    return replies


# In the order of the table's rows. The first one is what the others are compared with.
WAYS: dict[str, Way] = {
    "cold": Way("computed, nothing reused", cold),
    "device": Way("cached on the device", device),
    "sibling": Way("from a sibling that still runs", sibling),
    "fetched": Way("fetched by another worker", fetched),
    "chunked": Way(f"computed in chunks of {SMALL_BUDGET} tokens", chunked),
    "preempted": Way("resumed after a preemption", preempted),
    "restarted": Way("after the worker was killed", restarted),
}


def _add(result: WayResult, what: str, count: int) -> None:
    result.proof[what] = result.proof.get(what, 0) + count


def _has_shared_tier(services: EvalServices, result: WayResult) -> bool:
    result.expect(services.cluster.shared_tier, "no host tier that the workers share: there is no redis-server")
    return services.cluster.shared_tier


def _expect_fetched(result: WayResult, replies: list[Reply]) -> None:
    few = [reply for reply in replies if reply.answer.usage.fetched_tokens < LEAST_HIT_SHARE * len(reply.sheet.prefix)]
    if few:
        tokens = f"{few[0].answer.usage.fetched_tokens} of {len(few[0].sheet.prefix)} tokens"
        result.expect(False, f"{len(few)} requests fetched too little of their register, the first one {tokens}")


async def _ask_preempted(
    services: EvalServices, worker: SpecialWorker, sheet: Sheet, asked: Asked, salt: str, leads: list[int]
) -> Reply:
    """Asks beside a neighbour of higher priority, whose next page can only be one of the asker's.

    The lead that led to a preemption becomes the first one of `leads`: the next request's timing is much the same.
    """
    page, prompt_pages = services.page_tokens, -(-len(asked.prompt) // services.page_tokens)
    own_pages = prompt_pages - len(sheet.prefix) // page
    for lead in leads * ROUNDS_OF_LEADS:
        length = (services.tight_pages - own_pages) * page - lead
        # Never shorter than the register itself, whose pages both share.
        beside = (sheet.prefix * 2)[: max(length, len(sheet.prefix) + 1)]
        async with _neighbour(worker, beside, salt):
            reply = await services.try_asking(worker.address, sheet, asked, salt)
        if reply.answer.usage.num_preemptions:
            leads.remove(lead)
            leads.insert(0, lead)
            break
    services.advance()
    return reply


@asynccontextmanager
async def _neighbour(worker: SpecialWorker, prompt: Sequence[int], salt: str) -> AsyncIterator[None]:
    """A request of higher priority that decodes already, and has ended on exit."""
    decodes = asyncio.Event()

    def on_answer(_: Answer) -> None:
        decodes.set()

    sampling = greedy(NEIGHBOUR_TOKENS)
    call = worker.client.generate(worker.address, prompt, sampling, salt=salt, priority=1, on_answer=on_answer)
    neighbour, waiting = asyncio.create_task(call), asyncio.create_task(decodes.wait())
    await asyncio.wait({neighbour, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    yield
    await neighbour


async def _restart(services: EvalServices, victim: Child, result: WayResult) -> None:
    """kill -9, and wait until the worker serves again, as another incarnation."""
    old, restarts = (await services.client.describe(services.first)).incarnation, victim.restarts
    victim.kill()
    async with asyncio.timeout(RESTART_WAIT_S):
        await wait_restarted(services.client, services.first, victim, restarts)
    new = (await services.client.describe(services.first)).incarnation
    result.expect(new != old, "the worker is still the one that was to be killed")
    _add(result, "restarts", 1)
