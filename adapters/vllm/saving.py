"""Which pages a step completes, and what has become of those that wait to be written.

A page is saved in the step that completes it: in the next one a window may have left it, and its block may be
another's. Its bytes are staged in host memory at once; meanwhile the tier says which of them it wants, and later steps
tell the workers where to write those.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

from adapters.vllm.metadata import StageOrder, WriteOrder, WriteReport
from session.words import HASH_BYTES
from tier_client.values import PagePath, PageRange, Ticket

# vLLM's block 0 belongs to no request: a table has it where a window has left.
NULL_BLOCK = 0


class Completed(NamedTuple):
    """A page that a step completes: `blocks` has one for each group, NULL_BLOCK where the group has let go of it."""

    page_id: bytes
    blocks: tuple[int, ...]


class BoundaryState(NamedTuple):
    """After the step that names it, `block` has the recurrent state at the end of token `end` - 1."""

    group: int
    block: int
    end: int


def state_table(states: Iterable[BoundaryState], group: int, page_tokens: int) -> list[int]:
    """Returns a group's block table that has only the states at ends of pages that a step leaves.

    vLLM's own has the running state too, whose block is of a page that is not complete.
    """
    found: dict[int, int] = {}
    for state in states:
        if state.group == group and state.end % page_tokens == 0:
            found[state.end // page_tokens - 1] = state.block
    return [found.get(page, NULL_BLOCK) for page in range(max(found, default=-1) + 1)]


class Cursor:
    """How far the pages of one request are known to be saved, or saved by others."""

    def __init__(self, first_page: int) -> None:
        self.next_page = first_page

    def advance(
        self, page_ids: Sequence[bytes], tables: Sequence[Sequence[int]], computed: int, end: int, page_tokens: int
    ) -> list[Completed]:
        """Returns the pages that are complete after a step that computes tokens `computed` .. `end` - 1.

        `page_ids` has the pages whose tokens are known: behind a token that is drafted or still being sampled none is
        complete. `tables` are as the step finds them, so a block in them has what the page's id says.
        """
        # Computed again: after a preemption, or a load that failed.
        self.next_page = min(self.next_page, computed // page_tokens)
        last = max(min(end // page_tokens, len(page_ids)), self.next_page)
        pages = range(self.next_page, last)
        self.next_page = last
        blocks = [tuple(table[page] if page < len(table) else NULL_BLOCK for table in tables) for page in pages]
        return [Completed(bytes(page_ids[page]), held) for page, held in zip(pages, blocks, strict=True) if any(held)]


@dataclass(slots=True)
class Save:
    """Pages of one namespace that were staged together. Closed when each rank has told what it wrote."""

    number: int
    path: PagePath
    staged: tuple[tuple[int, ...], ...]
    """For each group, the positions in the path of the pages that were staged."""
    asked: Future[Ticket | None]
    until_s: float
    ticket: Ticket | None = None
    reported: dict[int, WriteReport] = field(default_factory=dict)

    def write_order(self, ticket: Ticket) -> WriteOrder:
        self.ticket = ticket
        groups = []
        for pages in ticket.pages:
            rows = {page: row for row, page in enumerate(self.staged[pages.group])}
            groups.append((pages, tuple(rows[page] for page in pages.pages)))
        return WriteOrder(self.number, tuple(groups))


class Batch(NamedTuple):
    """What one save stages: pages of one namespace, each once."""

    path: PagePath
    staged: tuple[tuple[int, ...], ...]
    blocks: tuple[tuple[int, ...], ...]

    def stage_order(self, number: int) -> StageOrder:
        return StageOrder(number, tuple((group, held) for group, held in enumerate(self.blocks) if held))

    def ranges(self) -> list[PageRange]:
        return [found for group, rows in enumerate(self.staged) for found in _runs(group, rows)]


def make_batch(adapter: str, salt: str, completed: Iterable[Completed], num_groups: int, most: int) -> Batch:
    """Returns a batch of at most `most` pages; what is beyond is not saved, a page of two requests is taken once."""
    unique = list({page.page_id: page for page in completed}.values())[:most]
    staged: list[tuple[int, ...]] = []
    blocks: list[tuple[int, ...]] = []
    for group in range(num_groups):
        rows = [row for row, page in enumerate(unique) if page.blocks[group] != NULL_BLOCK]
        staged.append(tuple(rows))
        blocks.append(tuple(unique[row].blocks[group] for row in rows))
    page_ids = b"".join(page.page_id for page in unique)
    assert len(page_ids) == len(unique) * HASH_BYTES
    return Batch(PagePath(page_ids, adapter=adapter, salt=salt), tuple(staged), tuple(blocks))


def _runs(group: int, rows: Sequence[int]) -> list[PageRange]:
    """Returns rising numbers as ranges without gaps."""
    found: list[PageRange] = []
    for row in rows:
        if found and found[-1].end_page == row:
            found[-1] = found[-1]._replace(end_page=row + 1)
        else:
            found.append(PageRange(group, row, row + 1))
    return found
