"""Pages of every group are replaced by those of another prefix behind the manager's back: the texts must differ.

Without this, tests/e2e/test_kinds.py might compare texts that no page has a part in.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.client import Answer, Client, unused_salt
from tests.e2e.conftest import Starter
from tests.e2e.kinds import KINDS, PAGE, WINDOW, make_kind
from tests.e2e.running import Draw
from tests.e2e.sabotage import Stand, open_stand
from worker_service.gpu.page_pools import PagePools

NUM_PAGES = 17
LENGTH = NUM_PAGES * PAGE
# The first page that a query behind the prefix still sees through its window.
FIRST_SEEN = (LENGTH - (WINDOW - 1)) // PAGE
ANSWER = 24


@pytest.fixture(params=list(KINDS))
async def stand(
    request: pytest.FixtureRequest, start: Starter, client: Client, model: Path, tmp_path: Path
) -> AsyncIterator[Stand]:
    folder = tmp_path / "kind"
    make_kind(request.param, folder, model / "tokenizer.json")
    async with open_stand(client, start.cache().address, folder) as opened:
        yield opened


class Prefix:
    """A prefix of whole pages that are on the device."""

    def __init__(self, stand: Stand, draw: Draw) -> None:
        self._stand = stand
        self.tokens = draw(LENGTH)
        # Fewer than a page: a question leaves no page that the next one would hit.
        self.question = draw(PAGE - 6)
        self.page_ids: list[list[int]] = []

    async def compute(self) -> None:
        self._stand.runner.launches.clear()
        cold = await self._generate([*self.tokens, 0], 1)
        assert cold.counts == (0, 0, LENGTH + 1)
        self.page_ids = [table[:NUM_PAGES] for table in self._stand.runner.launches[-1]]

    async def ask(self) -> list[int]:
        """All of the prefix must come from its pages, and of a window group those that are seen."""
        self._stand.runner.launches.clear()
        hit = await self._generate(self.tokens + self.question, ANSWER)
        assert hit.counts == (LENGTH, 0, len(self.question))
        for spec, table, ids in zip(
            self._stand.pages.specs(), self._stand.runner.launches[0], self.page_ids, strict=True
        ):
            first = FIRST_SEEN if spec.window_tokens else 0
            assert table[:NUM_PAGES] == [0] * first + ids[first:]
        return hit.tokens

    async def ask_cold(self) -> list[int]:
        answer = await self._generate(self.tokens + self.question, ANSWER, unused_salt())
        assert answer.usage.cached_tokens == 0
        return answer.tokens

    async def _generate(self, prompt: Sequence[int], max_tokens: int, salt: str = "") -> Answer:
        return await self._stand.client.generate(self._stand.address, prompt, max_tokens, salt=salt)


@contextmanager
def replaced(pages: PagePools, group: int, page_id: int, other_id: int) -> Iterator[None]:
    """The page holds what the other one holds; on exit it is as it was."""
    sound = pages.read_pages(group, [page_id]).clone()
    wrong = pages.read_pages(group, [other_id]).clone()
    assert not sound.equal(wrong)
    pages.write_pages(group, [page_id], wrong)
    yield
    pages.write_pages(group, [page_id], sound)


async def test_a_page_of_another_prefix_changes_the_text(stand: Stand, draw: Draw) -> None:
    prefix, other = Prefix(stand, draw), Prefix(stand, draw)
    await prefix.compute()
    await other.compute()
    sound = await prefix.ask()
    assert sound == await prefix.ask_cold()
    for group, spec in enumerate(stand.pages.specs()):
        for page in range(FIRST_SEEN, NUM_PAGES) if spec.window_tokens else (0, NUM_PAGES // 2, NUM_PAGES - 1):
            with replaced(stand.pages, group, prefix.page_ids[group][page], other.page_ids[group][page]):
                assert await prefix.ask() != sound, f"page {page} of group {spec.name}"
    # It was the damage, and it is undone.
    assert await prefix.ask() == sound


@pytest.mark.parametrize("stand", [name for name in KINDS if len(KINDS[name].groups) > 1], indirect=True)
async def test_a_page_that_no_window_reaches_changes_nothing(stand: Stand, draw: Draw) -> None:
    prefix, other = Prefix(stand, draw), Prefix(stand, draw)
    await prefix.compute()
    await other.compute()
    sound = await prefix.ask()
    (window,) = (group for group, spec in enumerate(stand.pages.specs()) if spec.window_tokens)
    for page in (0, FIRST_SEEN - 1):
        with replaced(stand.pages, window, prefix.page_ids[window][page], other.page_ids[window][page]):
            assert await prefix.ask() == sound
