"""What a fake worker knows of its sequences' pages: tables, slots and room, as the manager's answers change them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from session.messages import ExtendGrant, Grant, Remap
from session.words import GroupKind, GroupPages, GroupSpec, StateSlot
from tests.core.launcher import Launcher
from tests.core.world import Live, ids


class TableKeeper(Launcher):
    """A device whose sequences have tables."""

    def __init__(self, groups: Sequence[GroupSpec], page_tokens: int) -> None:
        super().__init__(groups, page_tokens)
        self.live: dict[int, Live] = {}

    def apply_grant(self, live: Live, grant: Grant) -> None:
        assert grant.usable_tokens % self.page_tokens == 0
        assert grant.usable_tokens < len(live.tokens), "at least one token must be computed"
        live.grant, live.fetches = grant, list(grant.fetches)
        proven = grant.usable_tokens // self.page_tokens
        if grant.fetches:  # where they bring a window's pages only, what lies behind them may be resident
            proven = grant.match.matched_tokens // self.page_tokens
        for fetch in grant.fetches:
            proven = max(proven, fetch.first_page + fetch.num_pages)
            for part in fetch.groups:
                for page in filter(None, ids(part.page_ids)):
                    self.shadow.poison(part.group, page)
        if not grant.fetches:
            assert grant.cached_tokens + grant.fetched_tokens == grant.usable_tokens
        live.tables = [{} for _ in self.groups]
        for pages in grant.tables:
            self._set_pages(live, pages)
            if self.groups[pages.group].kind != GroupKind.STATE:
                for number, page in live.tables[pages.group].items():
                    if number >= proven:
                        self.shadow.poison(pages.group, page)
        self._set_slots(live, grant)
        live.computed = live.reported = grant.cached_tokens if grant.fetches else grant.usable_tokens
        live.restored, live.rolled = False, 0
        live.room = grant.usable_tokens + (live.chunk or len(live.tokens))
        if not grant.fetches:
            self.check_grant(live)

    def _set_slots(self, live: Live, grant: Grant) -> None:
        live.working = {s.group: s.slot for s in grant.working}
        live.rolling = {s.group: s.slot for s in grant.rolling}
        live.snapshots = {}
        self._set_snapshots(live, grant.snapshots)
        for slots in (live.working, live.rolling):
            for group, slot in slots.items():
                self.shadow.poison(group, slot)

    def _set_snapshots(self, live: Live, snapshots: Iterable[StateSlot]) -> None:
        for slot in snapshots:
            assert slot.boundary_tokens % self.page_tokens == 0 and slot.slot
            assert slot.boundary_tokens > live.grant.usable_tokens or live.fetch
            live.snapshots[slot.group, slot.boundary_tokens] = slot.slot
            self.shadow.poison(slot.group, slot.slot)

    def _set_pages(self, live: Live, pages: GroupPages) -> list[tuple[int, int]]:
        new = [(pages.first_page + i, page) for i, page in enumerate(ids(pages.page_ids)) if page]
        live.tables[pages.group].update(new)
        for _, page in new:
            assert 1 <= page <= self.groups[pages.group].num_pages, "a page id outside its pool"
        return new

    def _apply_extend(self, extended: ExtendGrant, wanted: int) -> None:
        live = self.live[extended.sequence_id]
        live.room = max(live.room, wanted)
        for pages in extended.pages:
            for _, page in self._set_pages(live, pages):
                self.shadow.poison(pages.group, page)
        self._set_snapshots(live, extended.snapshots)

    def _apply_remap(self, remap: Remap) -> None:
        live = self.live.get(remap.sequence_id)
        if live is None:
            return
        for pages in remap.pages:
            for number, _page in self._set_pages(live, pages):
                self._check_page(live, pages.group, number, "a remap")
