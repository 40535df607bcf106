"""A device whose every slot remembers the prefix that wrote it: a wrong page shows as another prefix."""

from __future__ import annotations

from collections.abc import Sequence

from session.words import GroupKind, Namespace
from worker_service.core.batch import Batch
from worker_service.core.launches import Launch, LaunchRow
from worker_service.core.scheduler_config import SchedulerConfig

Prefix = tuple[Namespace, list[int]]


def marks_of(namespace: Namespace, tokens: Sequence[int]) -> list[int]:
    """Returns a number for each prefix of the tokens, from one token on."""
    mark, marks = hash(namespace), []
    for token in tokens:
        mark = hash((mark, token))
        marks.append(mark)
    return marks


class DeviceMemory:
    """Token slots by group and slot number; snapshot slots of a STATE group by group and page id."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._marks: dict[tuple[int, int], int] = {}

    def run(self, launch: Launch, prefixes: Sequence[Prefix]) -> list[int]:
        """Writes each slot, then reads each key. Returns the mark of each row that samples.

        `prefixes` are the rows' tokens from position 0 on; writes come as late, and reads as early, as the rules allow.
        """
        batch, marks = launch.batch, []
        for index, (row, (namespace, tokens)) in enumerate(zip(launch.rows, prefixes, strict=True)):
            self._check_row(batch, index, row, tokens)
            marks.append(marks_of(namespace, tokens))
            self._write(batch, index, row, marks[index])
        for index, row in enumerate(launch.rows):
            self._check_reads(batch, index, row.first_token, marks[index])
            self._move_states(batch, index, row, marks[index])
        return [marks[sampled.row][-1] for sampled in batch.sampled]

    def _check_row(self, batch: Batch, index: int, row: LaunchRow, tokens: list[int]) -> None:
        first, end = batch.cu_seqlens_q[index], row.first_token + row.num_tokens
        assert len(tokens) == end
        assert batch.token_ids[first : first + row.num_tokens].tolist() == tokens[row.first_token :]
        assert batch.positions[first : first + row.num_tokens].tolist() == list(range(row.first_token, end))

    def _write(self, batch: Batch, index: int, row: LaunchRow, marks: list[int]) -> None:
        first = batch.cu_seqlens_q[index]
        for group in self._config.paged_groups:
            slots = batch.slot_mapping[group]
            for offset in range(row.num_tokens):
                self._marks[group, slots[first + offset]] = marks[row.first_token + offset]

    def _check_reads(self, batch: Batch, index: int, first_token: int, marks: list[int]) -> None:
        page_tokens = self._config.page_tokens
        for group in self._config.paged_groups:
            spec, width = self._config.groups[group], batch.table_widths[group]
            table = batch.block_tables[group][index * width : (index + 1) * width]
            window = spec.window_tokens if spec.kind is GroupKind.WINDOW else len(marks)
            for position in range(max(first_token - window + 1, 0), len(marks)):
                page = table[position // page_tokens]
                assert page, "attention reads a hole"
                slot = page * page_tokens + position % page_tokens
                assert self._marks.get((group, slot)) == marks[position], "attention reads another prefix"

    def _move_states(self, batch: Batch, index: int, row: LaunchRow, marks: list[int]) -> None:
        """Recurrent states: restored or carried on, then left where the batch says."""
        for group, states in enumerate(batch.states):
            if states is None:
                continue
            working = states.working[index]
            assert working, "a row without a slot for its state"
            assert states.fresh[index] == (row.first_token == 0)
            if row.first_token:
                source = states.restore[index] or working
                assert self._marks[group, source] == marks[row.first_token - 1], "another prefix's state"
            self._marks[group, working] = marks[-1]
            left = zip(states.leave_row, states.leave_tokens, states.leave_slot, strict=True)
            for leaving, tokens, slot in left:
                if leaving == index:
                    self._marks[group, slot] = marks[row.first_token + tokens - 1]
            if states.rolling[index]:
                self._marks[group, states.rolling[index]] = marks[-1]

    # Pages that travel.

    def read_page(self, group: int, page: int) -> tuple[int | None, ...]:
        return tuple(self._marks.get((group, slot)) for slot in self._slots(group, page))

    def write_page(self, group: int, page: int, content: tuple[int | None, ...]) -> None:
        for slot, mark in zip(self._slots(group, page), content, strict=True):
            assert mark is not None, "a page was spilled before all of it was written"
            self._marks[group, slot] = mark

    def _slots(self, group: int, page: int) -> range:
        if self._config.groups[group].kind is GroupKind.STATE:
            return range(page, page + 1)
        return range(page * self._config.page_tokens, (page + 1) * self._config.page_tokens)
