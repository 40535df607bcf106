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
from tests.e2e.kinds import KINDS, PAGE, make_kind
from tests.e2e.running import Draw
from tests.e2e.sabotage import Stand, open_stand
from worker_service.gpu.page_pools import PagePools

# Of a prefix, by their tokens.
NUM_PAGES = {16: 17, 128: 3}
ANSWER = 24


@pytest.fixture(params=list(KINDS))
async def stand(
    request: pytest.FixtureRequest, start: Starter, client: Client, model: Path, tmp_path: Path
) -> AsyncIterator[Stand]:
    folder = tmp_path / "kind"
    make_kind(request.param, folder, model / "tokenizer.json")
    page = KINDS[request.param].page
    async with open_stand(client, start.cache().address, folder, page_tokens=page) as opened:
        yield opened


class Prefix:
    """A prefix of whole pages that are on the device."""

    def __init__(self, stand: Stand, draw: Draw, num_pages: int = 0) -> None:
        self._stand = stand
        self._page = stand.pages.page_tokens
        self.num_pages = num_pages or NUM_PAGES[self._page]
        self.tokens = draw(self.num_pages * self._page)
        # Fewer than a page: a question leaves no page that the next one would hit.
        self.question = draw(10)
        self.page_ids: list[list[int]] = []

    def first_seen(self, window_tokens: int) -> int:
        """The first page that a query behind the prefix still needs of such a group."""
        return (len(self.tokens) - window_tokens + 1) // self._page if window_tokens else 0

    def needed(self, window_tokens: int) -> list[int]:
        """Pages that are needed of such a group: all of a window, else three of them."""
        if window_tokens:
            return list(range(self.first_seen(window_tokens), self.num_pages))
        return [0, self.num_pages // 2, self.num_pages - 1]

    async def compute(self) -> None:
        self._stand.runner.launches.clear()
        cold = await self._generate([*self.tokens, 0], 1)
        assert cold.counts == (0, 0, len(self.tokens) + 1)
        self.page_ids = [table[: self.num_pages] for table in self._stand.runner.launches[-1]]

    async def ask(self) -> list[int]:
        return (await self.answer()).tokens

    async def answer(self) -> Answer:
        """All of the prefix must come from its pages, and of a window group those that are seen."""
        self._stand.runner.launches.clear()
        hit = await self._generate(self.tokens + self.question, ANSWER)
        assert hit.counts == (len(self.tokens), 0, len(self.question))
        for spec, table, ids in zip(
            self._stand.pages.specs(), self._stand.runner.launches[0], self.page_ids, strict=True
        ):
            first = self.first_seen(spec.window_tokens)
            assert table[: self.num_pages] == [0] * first + ids[first:]
        return hit

    async def ask_cold(self) -> list[int]:
        return (await self.answer_cold()).tokens

    async def answer_cold(self) -> Answer:
        answer = await self._generate(self.tokens + self.question, ANSWER, unused_salt())
        assert answer.usage.cached_tokens == 0
        return answer

    async def _generate(self, prompt: Sequence[int], max_tokens: int, salt: str = "") -> Answer:
        return await self._stand.client.generate(self._stand.address, prompt, max_tokens, salt=salt, logprobs=True)


@contextmanager
def replaced(pages: PagePools, group: int, page_id: int, other_id: int) -> Iterator[None]:
    """The page holds what the other one holds; on exit it is as it was."""
    sound = pages.read_pages(group, [page_id]).clone()
    wrong = pages.read_pages(group, [other_id]).clone()
    assert not sound.equal(wrong)
    pages.write_pages(group, [page_id], wrong)
    yield
    pages.write_pages(group, [page_id], sound)


SMALL_PAGES = [name for name, kind in KINDS.items() if kind.page == PAGE]


@pytest.mark.parametrize("stand", SMALL_PAGES, indirect=True)
async def test_a_page_of_another_prefix_changes_the_text(stand: Stand, draw: Draw) -> None:
    prefix, other = Prefix(stand, draw), Prefix(stand, draw)
    await prefix.compute()
    await other.compute()
    sound = await prefix.ask()
    assert sound == await prefix.ask_cold()
    for group, spec in enumerate(stand.pages.specs()):
        for page in prefix.needed(spec.window_tokens):
            with replaced(stand.pages, group, prefix.page_ids[group][page], other.page_ids[group][page]):
                assert await prefix.ask() != sound, f"page {page} of group {spec.name}"
    # It was the damage, and it is undone.
    assert await prefix.ask() == sound


@pytest.mark.parametrize("stand", [name for name in KINDS if name not in SMALL_PAGES], indirect=True)
async def test_a_large_page_of_another_prefix_changes_the_logprobs(stand: Stand, draw: Draw) -> None:
    """Of compressed entries a page has one, or a half of the only one that is to come: less than most texts show."""
    prefix, other = Prefix(stand, draw), Prefix(stand, draw)
    await prefix.compute()
    await other.compute()
    sound = await prefix.answer()
    assert sound.logprobs and sound.logprobs == (await prefix.answer_cold()).logprobs
    for group, spec in enumerate(stand.pages.specs()):
        for page in prefix.needed(spec.window_tokens):
            with replaced(stand.pages, group, prefix.page_ids[group][page], other.page_ids[group][page]):
                assert (await prefix.answer()).logprobs != sound.logprobs, f"page {page} of group {spec.name}"
    assert (await prefix.answer()).logprobs == sound.logprobs


@pytest.mark.parametrize("stand", [name for name in KINDS if len(KINDS[name].groups) > 1], indirect=True)
async def test_a_page_that_no_window_reaches_changes_nothing(stand: Stand, draw: Draw) -> None:
    prefix, other = Prefix(stand, draw), Prefix(stand, draw)
    await prefix.compute()
    await other.compute()
    sound = (await prefix.answer()).logprobs
    for group, spec in enumerate(stand.pages.specs()):
        for page in {0, prefix.first_seen(spec.window_tokens) - 1} if spec.window_tokens else ():
            with replaced(stand.pages, group, prefix.page_ids[group][page], other.page_ids[group][page]):
                assert (await prefix.answer()).logprobs == sound, f"page {page} of group {spec.name}"
