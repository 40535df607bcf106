"""What this worker's pages hold: for each page whose content is known, the chain of tokens that it ends.

A cache service that has lost its state is offered it (restoration.py). An entry says that the page holds the KV of
exactly these tokens, written by this process; it is made when a completed launch has written the page, or a fetch has
filled it, and dropped when a reply names the page for writing, before anything is written. So nothing has to be asked
of the service that is gone.

    page of the leading group   its tokens · the page before it · when it was recorded and last used · namespace
    page of another group       the page of the leading group that stands at the same place of the same chain

Links carry the stamp of what they point to: an entry whose page was recorded anew is another one, and what hung on the
old one is no longer reached. The leading group is the first FULL one, since nothing resumes without its pages. Of a
model without any nothing is kept.

Arrays, no object for each page: 32 bytes and 4 for each token for a page of the leading group, 12 for one of another.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from session.words import NO_PAGE, GroupKind, GroupSpec, Namespace


class Written(NamedTuple):
    """Pages `first` to `end - 1` of a chain hold its KV; `tokens` begin at token 0, `tables` at page number `base`.

    `base` is at most the page before `first`. `snapshots` are (group, slot, page number before the boundary).
    """

    namespace: Namespace
    tokens: array[int]
    tables: Sequence[array[int]]
    base: int
    first: int
    end: int
    snapshots: tuple[tuple[int, int, int], ...] = ()

    def page_id(self, group: int, page: int) -> int:
        """Returns NO_PAGE beyond the table."""
        table = self.tables[group]
        return table[page - self.base] if page - self.base < len(table) else NO_PAGE


class Inventory:
    def __init__(self, groups: Sequence[GroupSpec], page_tokens: int) -> None:
        full = [group for group, spec in enumerate(groups) if spec.kind is GroupKind.FULL]
        self.leading = full[0] if full else None
        self.page_tokens = page_tokens
        # Pages before a boundary that the longest window reads where a request resumes there.
        self.reach_pages = max(1, *(-(-(spec.window_tokens - 1) // page_tokens) for spec in groups))
        self.clock = 0  # stamps rise with each record and each use
        size = groups[full[0]].num_pages + 1 if full else 0
        self.stamps = array("Q", (0,)) * size  # 0: nothing is known of the page
        self.parents = array("I", (0,)) * size  # NO_PAGE: the page begins a prompt
        self.parent_stamps = array("Q", (0,)) * size
        self.used = array("Q", (0,)) * size  # stamp of the last grant whose window reached back to the page
        self.tokens = array("i", (0,)) * (size * page_tokens)
        self._name_of = array("I", (0,)) * size
        self._names: list[Namespace | None] = []
        self._number_of: dict[Namespace, int] = {}
        self._free_names: list[int] = []
        self._num_named = array("q")  # entries of each namespace
        # Of the other groups: the page of the leading group, and its stamp; 0: nothing is known.
        others = [(group, spec.num_pages + 1) for group, spec in enumerate(groups) if full and group != full[0]]
        self.leads = {group: array("I", (0,)) * num for group, num in others}
        self.lead_stamps = {group: array("Q", (0,)) * num for group, num in others}
        self._paged = [group for group, _ in others if groups[group].kind is not GroupKind.STATE]
        self.num_pages = 0  # of the leading group that are known

    # -- what becomes known --

    def record(self, written: Written) -> None:
        """Records pages whose chain is known up to their first one; otherwise nothing."""
        if self.leading is None:
            return
        parent = written.page_id(self.leading, written.first - 1) if written.first else NO_PAGE
        if written.first and not self._is(parent, written, written.first - 1):
            return
        size = self.page_tokens
        for page in range(written.first, written.end):
            page_id = written.page_id(self.leading, page)
            tokens = written.tokens[page * size : (page + 1) * size]
            if not page_id or not self._record_page(page_id, parent, tokens, written.namespace):
                return
            for group in self._paged:
                self._link(group, written.page_id(group, page), page_id)
            parent = page_id
        for group, slot, page in written.snapshots:
            lead = written.page_id(self.leading, page)
            if self._is(lead, written, page):
                self._link(group, slot, lead)

    def _link(self, group: int, page_id: int, lead: int) -> None:
        if page_id:
            self.leads[group][page_id] = lead
            self.lead_stamps[group][page_id] = self.stamps[lead]

    def _record_page(self, page_id: int, parent: int, tokens: array[int], namespace: Namespace) -> bool:
        """Returns False where the page is known to hold something else: then nothing is known of it any more."""
        size = self.page_tokens
        parent_stamp = self.stamps[parent] if parent else 0
        if self.stamps[page_id]:
            is_same = self.tokens[page_id * size : (page_id + 1) * size] == tokens
            if not is_same or self.namespace(page_id) != namespace:
                self._forget_page(page_id)
                return False
            if (self.parents[page_id], self.parent_stamps[page_id]) == (parent, parent_stamp):
                return True
        else:
            self._name_of[page_id] = self._name(namespace)
            self.num_pages += 1
            self.tokens[page_id * size : (page_id + 1) * size] = tokens
        self.clock += 1
        self.stamps[page_id] = self.used[page_id] = self.clock
        self.parents[page_id], self.parent_stamps[page_id] = parent, parent_stamp
        return True

    def _is(self, page_id: int, written: Written, page: int) -> bool:
        """Returns whether the page is known to hold that page of the chain."""
        if not page_id or not self.stamps[page_id] or self.namespace(page_id) != written.namespace:
            return False
        size = self.page_tokens
        held = self.tokens[page_id * size : (page_id + 1) * size]
        return held == written.tokens[page * size : (page + 1) * size]

    def use(self, page_ids: Iterable[int]) -> None:
        """Notes that a request resumes behind these pages of the leading group, and that windows reach back to all."""
        self.clock += 1
        clock, stamps, used = self.clock, self.stamps, self.used
        for page_id in page_ids:
            if stamps[page_id]:
                used[page_id] = clock

    # -- what is forgotten --

    def forget_pages(self, group: int, page_ids: Iterable[int]) -> None:
        """Forgets these pages: they may be written from now on."""
        if group == self.leading:
            stamps = self.stamps
            for page_id in page_ids:
                if stamps[page_id]:
                    self._forget_page(page_id)
        elif self.leading is not None:
            lead_stamps = self.lead_stamps[group]
            for page_id in page_ids:
                lead_stamps[page_id] = 0

    def forget(self, namespaces: Iterable[Namespace] | None) -> None:
        """Forgets all pages of these namespaces, or of all (None). Takes time with the pool's size."""
        for namespace in list(self._number_of) if namespaces is None else namespaces:
            number = self._number_of.get(namespace)
            if number is not None:
                mine = [page for page, stamp in enumerate(self.stamps) if stamp and self._name_of[page] == number]
                for page_id in mine:
                    self._forget_page(page_id)

    def _forget_page(self, page_id: int) -> None:
        self.stamps[page_id] = 0
        self.num_pages -= 1
        number = self._name_of[page_id]
        self._num_named[number] -= 1
        if not self._num_named[number]:
            namespace = self._names[number]
            assert namespace is not None
            self._names[number] = None
            del self._number_of[namespace]
            self._free_names.append(number)

    # -- reading --

    def namespace(self, page_id: int) -> Namespace:
        namespace = self._names[self._name_of[page_id]]
        assert namespace is not None, "a known page has a namespace"
        return namespace

    def page(self, page_id: int) -> array[int]:
        """Returns the tokens of a known page of the leading group."""
        return self.tokens[page_id * self.page_tokens : (page_id + 1) * self.page_tokens]

    def _name(self, namespace: Namespace) -> int:
        """Returns the namespace's number, for one entry more; numbers of namespaces without entries are used again."""
        number = self._number_of.get(namespace)
        if number is None:
            if self._free_names:
                number = self._free_names.pop()
                self._names[number] = namespace
            else:
                number = len(self._names)
                self._names.append(namespace)
                self._num_named.append(0)
            self._number_of[namespace] = number
        self._num_named[number] += 1
        return number
