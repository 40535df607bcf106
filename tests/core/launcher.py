"""What a launch reads and writes, in the shadow: each page that is read must hold the very prefix of its sequence."""

from __future__ import annotations

from collections.abc import Sequence

from session.words import GroupKind, GroupSpec
from tests.core.shadow import Shadow, state_value
from tests.core.world import Live


class Launcher:
    """One device: its groups and their pages."""

    def __init__(self, groups: Sequence[GroupSpec], page_tokens: int) -> None:
        self.groups = tuple(groups)
        self.page_tokens = page_tokens
        self.shadow = Shadow(page_tokens)

    def _check_page(self, live: Live, group: int, number: int, what: str, end: int | None = None) -> None:
        page = live.tables[group].get(number, 0)
        assert page, f"{what}: group {group} lacks page {number}"
        first = number * self.page_tokens
        for position in range(first, min(first + self.page_tokens, len(live.marks) if end is None else end)):
            held = self.shadow.slot(group, page, position - first)
            assert held == live.marks[position], f"{what}: wrong content, group {group} page {number} (id {page})"

    def check_reads(self, live: Live, what: str = "a launch") -> None:
        """Everything that a launch from `computed` on reads holds this very prefix."""
        at = live.computed
        for group, spec in enumerate(self.groups):
            if spec.kind == GroupKind.STATE:
                continue
            first = max(0, at - (spec.window_tokens - 1)) if spec.kind == GroupKind.WINDOW else 0
            for number in range(first // self.page_tokens, -(-at // self.page_tokens) if first < at else 0):
                self._check_page(live, group, number, what, at)

    def check_grant(self, live: Live) -> None:
        self.check_reads(live, "a grant")
        state_groups = [g for g, spec in enumerate(self.groups) if spec.kind == GroupKind.STATE]
        assert sorted(live.working) == state_groups and set(live.rolling) <= set(state_groups)
        used = live.grant.usable_tokens
        assert [s.group for s in live.grant.restore] == (state_groups if used else [])
        for slot in live.grant.restore:
            assert slot.boundary_tokens == used
            held = self.shadow.value(slot.group, slot.slot)
            assert held == state_value(live.marks, used), "a grant: the snapshot holds another state"

    def launch(self, live: Live, num_tokens: int | None = None) -> None:
        """Compute the next tokens. Nothing is reported by this."""
        assert live.fetch is None, "a sequence that waits for its fetch may not run"
        start = live.computed
        end = len(live.tokens) if num_tokens is None else start + num_tokens
        assert start < end <= min(len(live.tokens), live.room), "more than was asked for"
        self.check_reads(live)
        for group, spec in enumerate(self.groups):
            if spec.kind == GroupKind.STATE:
                self._run_state(live, group, start, end)
            else:
                self._write_pages(live, group, start, end)
        live.computed = end

    def _write_pages(self, live: Live, group: int, start: int, end: int) -> None:
        table, size = live.tables[group], self.page_tokens
        for position in range(start, end):
            page = table.get(position // size, 0)
            assert page, f"no page for position {position} in group {group}"
            self.shadow.write(group, page, position % size, live.marks[position])

    def _run_state(self, live: Live, group: int, start: int, end: int) -> None:
        slot = live.working[group]
        if not live.restored and start == live.grant.usable_tokens:
            source = next((s.slot for s in live.grant.restore if s.group == group), None)
            self.shadow.store(group, slot, state_value([], 0) if source is None else self.shadow.value(group, source))
        held = self.shadow.value(group, slot)
        assert held == state_value(live.marks, start), f"a launch: the working state of group {group} is another's"
        for (other, boundary), target in live.snapshots.items():
            if other == group and start < boundary <= end:
                self.shadow.store(group, target, state_value(live.marks, boundary))
        boundary = end // self.page_tokens * self.page_tokens
        if boundary > max(start, live.prompt_len):
            live.rolled = boundary
            if group in live.rolling:
                self.shadow.store(group, live.rolling[group], state_value(live.marks, boundary))
        self.shadow.store(group, slot, state_value(live.marks, end))
        if group == max(g for g, spec in enumerate(self.groups) if spec.kind == GroupKind.STATE):
            live.restored = True
