"""A snapshot is replaced by a wrong one behind the manager's back: the texts must differ.

Without this, tests/e2e/test_states.py might compare texts that no snapshot has a part in.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch

from session.words import GroupKind
from tests.e2e.client import Answer, Client, unused_salt
from tests.e2e.conftest import Starter
from tests.e2e.running import Draw
from tests.e2e.sabotage import FULL, PAGE, Stand, open_stand
from tests.e2e.states import make_states
from worker_service.core.state_rows import StateRows
from worker_service.gpu.page_pools import PagePools

NUM_PAGES = 9
ANSWER = 40
# Scans ask for pages of their grid, convolutions for none.
PAGES = {"lfm2": PAGE}


FAMILIES = ("lfm2", "qwen3-next", "qwen3.5", "bamba", "granite-hybrid", "falcon-h1", "nemotron-h", "kimi-linear")


@pytest.fixture(params=FAMILIES)
async def stand(
    request: pytest.FixtureRequest, start: Starter, client: Client, model: Path, tmp_path: Path
) -> AsyncIterator[Stand]:
    make_states(tmp_path / "states", model / "tokenizer.json", request.param)
    page_tokens = PAGES.get(request.param, 0)
    async with open_stand(client, start.cache().address, tmp_path / "states", page_tokens=page_tokens) as opened:
        yield opened


class Prefix:
    """A prefix of whole pages whose end has a snapshot."""

    def __init__(self, stand: Stand, draw: Draw) -> None:
        self._stand = stand
        (self._group,) = (at for at, spec in enumerate(stand.pages.specs()) if spec.kind is GroupKind.STATE)
        self.page = stand.pages.page_tokens
        self.tokens = draw(NUM_PAGES * self.page)
        # Fewer than a page: a question leaves no snapshot that the next one would hit.
        self.question = draw(2)
        self.page_ids: list[int] = []

    async def compute(self, num_pages: int = NUM_PAGES) -> int:
        """Returns the slot of the snapshot behind `num_pages` pages."""
        length = num_pages * self.page
        answer = await self._generate([*self.tokens[:length], 0], 1)
        states, self.page_ids = self._first_states(), self._stand.runner.last_table[:num_pages]
        return states.leave_slot[states.leave_tokens.index(length - answer.usage.cached_tokens)]

    async def ask(self, slot: int) -> list[int]:
        """All of the prefix must come from its pages, and the state from this slot."""
        hit = await self._generate(self.tokens + self.question, ANSWER)
        assert hit.counts == (len(self.tokens), 0, len(self.question))
        assert self._first_states().restore.tolist() == [slot]
        return hit.tokens

    @property
    def later_state(self) -> torch.Tensor:
        """The state behind all that was asked and answered last."""
        return self.state(self._first_states().working[0])

    def _first_states(self) -> StateRows:
        """Returns those of the last request's first launch."""
        states = self._stand.runner.states[0][self._group]
        assert states is not None
        return states

    async def ask_cold(self) -> list[int]:
        answer = await self._generate(self.tokens + self.question, ANSWER, unused_salt())
        assert answer.usage.cached_tokens == 0
        return answer.tokens

    async def _generate(self, prompt: Sequence[int], max_tokens: int, salt: str = "") -> Answer:
        self._stand.runner.states.clear()
        return await self._stand.client.generate(self._stand.address, prompt, max_tokens, salt=salt)

    def state(self, slot: int) -> torch.Tensor:
        return self._stand.pages.read_pages(self._group, [slot]).clone()

    def with_state(self, slot: int, wrong: torch.Tensor) -> AbstractContextManager[None]:
        return self._replaced(self._group, slot, wrong)

    def with_page(self, page: int, other: Prefix) -> AbstractContextManager[None]:
        """The page of keys and values is the other prefix's."""
        wrong = self._stand.pages.read_pages(FULL, [other.page_ids[page]])
        return self._replaced(FULL, self.page_ids[page], wrong)

    @contextmanager
    def _replaced(self, group: int, page_id: int, wrong: torch.Tensor) -> Iterator[None]:
        """The page, or slot, holds other bytes; on exit it is as it was."""
        pages: PagePools = self._stand.pages
        sound = pages.read_pages(group, [page_id]).clone()
        assert not sound.equal(wrong)
        pages.write_pages(group, [page_id], wrong)
        yield
        pages.write_pages(group, [page_id], sound)


async def test_a_wrong_snapshot_changes_the_text(stand: Stand, draw: Draw) -> None:
    prefix, other = Prefix(stand, draw), Prefix(stand, draw)
    early, slot, theirs = await prefix.compute(NUM_PAGES - 1), await prefix.compute(), await other.compute()
    sound = await prefix.ask(slot)
    wrong = {
        "another prefix's": prefix.state(theirs),
        "one boundary early": prefix.state(early),
        "a later one": prefix.later_state,
        "nothing's": torch.zeros_like(prefix.state(slot)),
    }
    assert sound == await prefix.ask_cold()
    for name, state in wrong.items():
        with prefix.with_state(slot, state):
            assert await prefix.ask(slot) != sound, name
    for page in (0, NUM_PAGES // 2, NUM_PAGES - 1):
        with prefix.with_page(page, other):
            assert await prefix.ask(slot) != sound, f"page {page}"
    # It was the damage, and it is undone.
    assert await prefix.ask(slot) == sound
