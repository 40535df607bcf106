"""A fake worker's mover: it carries out spills and fetches, and checks what each page and each key holds."""

from __future__ import annotations

from session.messages import Ack, StepReply
from session.words import Transfer, TransferStatus
from tests.core.session import Session
from tests.core.world import DONE, FAILED, MISSING, Live, ids, keys


class Mover(Session):
    """Orders wait in `spills`; fetches wait in their sequences, or as orphans."""

    def do_spill(self, index: int = 0, num_done: int | None = None, status: TransferStatus | None = None) -> StepReply:
        """The mover carries out one spill order, or its first pages, and says so."""
        order, expected = self.spills.pop(index)
        num_done = order.num_pages if num_done is None else num_done
        status = status or (DONE if num_done == order.num_pages else FAILED)
        for part in order.groups:
            for page, key in list(zip(ids(part.page_ids), keys(part), strict=True))[:num_done]:
                if page:
                    value = self.shadow.value(part.group, page)
                    assert value == expected[key], "a page changed while its spill was under way"
                    self.store[key] = value
        return self.step(acks=[Ack(order.ticket, num_done, status, 64 * num_done, 0.001)])

    def spill_all(self) -> None:
        while self.spills:
            self.do_spill()

    def read_host(self, fetch: Transfer, num_done: int | None = None) -> int:
        """Bring leading pages from the host tier; stops at the first one that is not there."""
        limit = fetch.num_pages if num_done is None else num_done
        for i in range(limit):
            parts = [(p.group, ids(p.page_ids)[i], keys(p)[i]) for p in fetch.groups if keys(p)[i]]
            if any(key not in self.store for _, _, key in parts):
                return i
            for group, page, key in parts:
                self.shadow.store(group, page, self.store[key])
        return limit

    def do_fetch(
        self, live: Live, num_done: int | None = None, status: TransferStatus | None = None, index: int = 0
    ) -> StepReply:
        """One of a sequence's fetches; after the last its new grant is applied, or a refusal ends the lease."""
        fetch = live.fetches[index % len(live.fetches)]
        done = self.read_host(fetch, num_done)
        status = status or (DONE if done == fetch.num_pages else MISSING)
        reply = self.step(acks=[Ack(fetch.ticket, done, status, 64 * done, 0.001)])
        live.fetches.remove(fetch)
        self.fetched(live, reply)
        return reply

    def fetched(self, live: Live, reply: StepReply) -> None:
        if any(r.sequence_id == live.id for r in reply.refusals):
            assert not live.fetches, "a refused replan while pages are on their way"
            self.forget(live)
            return
        for grant in reply.grants:
            if grant.sequence_id == live.id:
                assert not live.fetches, "a new plan while pages are on their way"
                self.apply_grant(live, grant)

    def fetch_all(self, live: Live) -> None:
        rounds = 0
        while live.fetch is not None and not live.ended:
            self.do_fetch(live)
            rounds += 1
            assert rounds < 64, "replanning does not end"

    def orphaned(self, group: int) -> int:
        """Pages of fetches whose sequence has ended: theirs until the ack."""
        parts = [part for fetch in self.orphans.values() for part in fetch.groups if part.group == group]
        return sum(1 for part in parts for page in ids(part.page_ids) if page)

    def ack_orphan(self, ticket: int) -> None:
        fetch = self.orphans.pop(ticket)
        done = self.read_host(fetch)
        self.step(acks=[Ack(fetch.ticket, done, DONE if done == fetch.num_pages else MISSING)])
