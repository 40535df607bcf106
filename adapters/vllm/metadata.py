"""Messages between the scheduler's side and the workers: orders of a step, and reports afterwards.

Plain values: vLLM sends them between its processes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from session.words import TransferStatus
from tier_client.values import KeyedPages


@dataclass(frozen=True, slots=True)
class BlockPages:
    """Pages of one group and the blocks that they go to, one for each. `pages` are numbered as the lookup's path is."""

    pages: KeyedPages
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Read these pages into blocks that are not in use yet. `end_page`: where the request resumes then."""

    number: int
    request_id: str
    first_page: int
    end_page: int
    groups: tuple[BlockPages, ...]


@dataclass(frozen=True, slots=True)
class StageOrder:
    """Copy blocks that this step completes to host memory: for each group its blocks, in the order of the path."""

    number: int
    blocks: tuple[tuple[int, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class WriteOrder:
    """Write these of the pages staged under `number`; `rows` are their positions among the group's staged blocks."""

    number: int
    groups: tuple[tuple[KeyedPages, tuple[int, ...]], ...]


@dataclass(slots=True)
class StepOrders:
    """`overwritten`: blocks that this step, or a load of it, writes anew. Staging copies that read them come first."""

    loads: list[LoadOrder] = field(default_factory=list)
    stages: list[StageOrder] = field(default_factory=list)
    writes: list[WriteOrder] = field(default_factory=list)
    drops: list[int] = field(default_factory=list)
    overwritten: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class LoadReport:
    """`num_pages`: of the pages from the order's `first_page` on, how many of the first were read in every group.

    A load that read everything tells its bytes on this rank, and how long it took.
    """

    number: int
    rank: int
    status: TransferStatus
    num_pages: int
    num_bytes: int = 0
    took_s: float = 0.0


@dataclass(frozen=True, slots=True)
class WriteReport:
    """`written`: groups, and how many of the first of their pages in the ticket are stored."""

    number: int
    rank: int
    status: TransferStatus
    written: tuple[tuple[int, int], ...]


@dataclass(slots=True)
class StepReports:
    """The reports of one rank, or of all ranks together."""

    loads: list[LoadReport] = field(default_factory=list)
    writes: list[WriteReport] = field(default_factory=list)

    def merge(self, other: StepReports) -> StepReports:
        return StepReports(self.loads + other.loads, self.writes + other.writes)

    def __bool__(self) -> bool:
        return bool(self.loads or self.writes)
