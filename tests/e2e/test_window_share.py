"""A window's pool is smaller than that of whole prompts (ADR 17): what that costs a hit, and what Usage says of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from protos.v1 import cache_pb2, types_pb2
from tests.e2e.client import Client
from tests.e2e.conftest import Starter
from tests.e2e.kinds import PAGE, WINDOW, make_kind
from tests.e2e.running import Draw, healthy

POOL_PAGES = 300
TOKEN_BUDGET = 64
# Of one sequence: its window and two cut pages, and what three launches write.
RUNNING_PAGES = -(-WINDOW // PAGE) + 2 + 3 * TOKEN_BUDGET // PAGE
ANSWER = 12
GONE = (f"window{WINDOW}", "window_gone")


class Found(NamedTuple):
    """What an answer's Usage says of its prompt."""

    counts: tuple[int, int, int]
    matched: int
    usable: int
    limiting_group: str
    reason: str


class Asked(NamedTuple):
    """A worker, and all answers that it gave."""

    client: Client
    address: str
    texts: list[list[int]]

    async def find(self, prompt: Sequence[int]) -> Found:
        answer = await self.client.generate(self.address, prompt, ANSWER)
        self.texts.append(answer.tokens)
        usage = answer.usage
        reason = types_pb2.MissReason.Name(usage.miss_reason).removeprefix("MISS_REASON_").lower()
        return Found(answer.counts, usage.matched_tokens, usage.usable_tokens, usage.limiting_group, reason)

    async def fill(self, prompts: Sequence[Sequence[int]]) -> None:
        """Each leaves a window of three or four pages behind."""
        for prompt in prompts:
            found = await self.find(prompt)
            assert found == ((0, 0, len(prompt)), 0, 0, "", "never_seen")


async def test_a_window_that_is_gone_limits_the_hit_and_is_named(
    client: Client, start: Starter, draw: Draw, tmp_path: Path, model: Path
) -> None:
    folder = tmp_path / "kind"
    make_kind("gpt-oss", folder, model / "tokenizer.json")
    cache = start.cache()
    settings = {"model": folder, "pool_pages": POOL_PAGES, "max_num_seqs": 1, "token_budget": TOKEN_BUDGET}
    small, large = (
        start.workers(cache.address, 1, number, window_share=share, max_model_len=600, **settings)[0].address
        for number, share in ((1, 0.0), (2, 1.0))
    )
    head = draw(161)
    turn, others = head + draw(200), [draw(361) for _ in range(4)]
    sibling = head + draw(20)
    asked = {address: Asked(client, address, []) for address in (small, large)}
    for one in asked.values():
        assert await one.find(head) == ((0, 0, 161), 0, 0, "", "never_seen")
        assert await one.find(turn) == ((160, 0, 201), 160, 160, "", "never_seen")
        await one.fill(others[:2])

    # Every page of the prompt is there, but for the windows: nothing can be resumed.
    assert await asked[small].find(turn) == ((0, 0, 361), 352, 0, *GONE)
    assert await asked[small].find(turn) == ((352, 0, 9), 352, 352, "", "page_tail")
    await asked[small].fill(others[2:])
    # A window before an earlier boundary, which a sibling has just computed, is what the hit falls back to.
    assert await asked[small].find(sibling) == ((0, 0, 181), 160, 0, *GONE)
    assert await asked[small].find(turn) == ((160, 0, 201), 352, 160, *GONE)

    for _ in range(2):
        assert await asked[large].find(turn) == ((352, 0, 9), 352, 352, "", "page_tail")
    await asked[large].fill(others[2:])
    assert await asked[large].find(sibling) == ((160, 0, 21), 160, 160, "", "never_seen")
    assert await asked[large].find(turn) == ((352, 0, 9), 352, 352, "", "page_tail")

    assert asked[small].texts == asked[large].texts
    stats = await client.until(cache.address, healthy)
    assert [num_pages(worker) for worker in stats.workers] == [(POOL_PAGES, RUNNING_PAGES), (POOL_PAGES, POOL_PAGES)]
    assert [worker.misses["window_gone"] for worker in stats.workers] == [3, 0]


def num_pages(worker: cache_pb2.WorkerStats) -> tuple[int, ...]:
    return tuple(group.num_pages for group in worker.groups)
