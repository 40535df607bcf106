"""A fake worker on a real manager: it launches, publishes, moves pages in its shadow, and checks each page it is given.

The simulation uses it too.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from session.messages import Acquire, Adopt, Extend, Grant, Publish, Refusal, Release, Shrink, StepReply
from session.words import GroupKind, GroupPages, Namespace, PageId, ReleaseReason, SequenceId, StateSlot
from tests.core.mover import Mover
from tests.core.shadow import Shadow, marks_of
from tests.core.world import ABORTED, FINISHED, NS, PREEMPTED, Live, pack


class FakeWorker(Mover):
    """An engine without a model. Launches run at once; whether they were reported is the caller's choice."""

    def submit(
        self,
        tokens: Sequence[int],
        namespace: Namespace = NS,
        *,
        chunk: int = 0,
        reserve: int = 0,
        priority: int = 0,
        sequence_id: int | None = None,
        kept: int = 0,
        bypass: bool = False,
        leave_at: Sequence[int] = (),
    ) -> Live | Refusal:
        if sequence_id is None:
            self.world.next_sequence += 1
            sequence_id = self.world.next_sequence
        self.world.next_sequence = max(self.world.next_sequence, sequence_id)
        acquire = Acquire(
            SequenceId(sequence_id), namespace, pack(tokens), reserve, chunk, priority, 0, bypass, tuple(leave_at)
        )
        sent = acquire._replace(tokens=pack(tokens[kept:]), kept_tokens=kept)
        reply = self.step(acquires=[sent])
        return self.taken(acquire, reply)

    def taken(self, acquire: Acquire, reply: StepReply) -> Live | Refusal:
        """The answer to one of a Step's acquires, applied."""
        for refusal in reply.refusals:
            if refusal.sequence_id == acquire.sequence_id:
                return refusal
        (grant,) = [g for g in reply.grants if g.sequence_id == acquire.sequence_id]
        tokens = list(array("i", acquire.tokens))
        live = Live(
            acquire.sequence_id,
            acquire.namespace,
            tokens,
            marks_of(acquire.namespace, tokens),
            len(tokens),
            len(tokens),
            [{} for _ in self.groups],
            grant,
            priority=acquire.priority,
            chunk=acquire.chunk_tokens,
            bypass=acquire.bypass_cache,
        )
        self.live[live.id] = live
        self.kept.pop(live.id, None)
        self.apply_grant(live, grant)
        return live

    def start(self, tokens: Sequence[int], namespace: Namespace = NS, **options: Any) -> Live:
        """Submit a prompt that must be granted."""
        live = self.submit(tokens, namespace, **options)
        assert isinstance(live, Live), live
        return live

    def refused(self, tokens: Sequence[int], namespace: Namespace = NS, **options: Any) -> Refusal:
        refusal = self.submit(tokens, namespace, **options)
        assert isinstance(refusal, Refusal), refusal
        return refusal

    def publish_of(self, live: Live, computed: int | None = None, known: int | None = None) -> Publish:
        computed = live.computed if computed is None else computed
        known = max(live.known_len, computed, len(live.tokens) if known is None else known)
        return Publish(SequenceId(live.id), pack(live.tokens[live.known_len : known]), computed)

    def published(self, live: Live, publish: Publish) -> None:
        live.known_len += len(publish.tokens) // 4
        live.reported = publish.computed_tokens

    def publish(self, live: Live, computed: int | None = None, known: int | None = None) -> StepReply:
        publish = self.publish_of(live, computed, known)
        reply = self.step(publishes=[publish])
        self.published(live, publish)
        return reply

    def extend(self, live: Live, num_tokens: int, leave_at: Sequence[int] = ()) -> bool:
        """Ask for room; False when it was refused."""
        reply = self.step(extends=[Extend(SequenceId(live.id), num_tokens, tuple(leave_at))])
        granted = any(e.sequence_id == live.id for e in reply.extends)
        assert granted != any(r.sequence_id == live.id for r in reply.refusals)
        return granted

    def shrink(self, live: Live, num_tokens: int) -> StepReply:
        """Give back the pages behind that length."""
        reply = self.step(shrinks=[Shrink(SequenceId(live.id), num_tokens)])
        self.shrunk(live, num_tokens)
        return reply

    def shrunk(self, live: Live, num_tokens: int) -> None:
        for table in live.tables:
            for number in [number for number in table if number >= -(-num_tokens // self.page_tokens)]:
                del table[number]
        live.room = min(live.room, num_tokens)

    def release(self, live: Live, reason: ReleaseReason = FINISHED) -> StepReply:
        reply = self.step(releases=[self.release_of(live, reason)])
        self.released(live, reason)
        return reply

    def release_of(self, live: Live, reason: ReleaseReason = FINISHED) -> Release:
        rolling = live.rolled if live.rolling and reason is not ABORTED else 0
        return Release(SequenceId(live.id), reason, rolling)

    def released(self, live: Live, reason: ReleaseReason) -> None:
        self.forget(live)
        if reason is PREEMPTED:
            self.kept[live.id] = live.known_len

    def prefill(self, live: Live, chunk: int = 0, *, publish: bool = True) -> None:
        """Compute the rest of the tokens in chunks, each asked for, launched and published."""
        while live.computed < len(live.tokens):
            size = min(chunk or len(live.tokens), len(live.tokens) - live.computed)
            assert self.extend(live, live.computed + size), "no room for a chunk"
            self.launch(live, size)
            if publish:
                self.publish(live)

    def decode(self, live: Live, tokens: Sequence[int], *, publish: bool = True) -> None:
        """Each token is sampled, given room and computed; the last one has KV too."""
        for token in tokens:
            live.append([token])
            assert self.extend(live, len(live.tokens)), "no room to decode"
            self.launch(live)
            if publish:
                self.publish(live)

    def sample(self, live: Live, tokens: Sequence[int]) -> None:
        """Tokens that were accepted but not computed yet."""
        live.append(tokens)

    def run(
        self, tokens: Sequence[int], output: Sequence[int] = (), namespace: Namespace = NS, **options: Any
    ) -> Grant:
        """A whole request: acquire, prefill, decode, finish."""
        live = self.start(tokens, namespace, **options)
        self.fetch_all(live)
        grant = live.grant
        self.prefill(live, options.get("chunk", 0))
        self.decode(live, output)
        self.release(live)
        return grant

    def restart(self, incarnation: str) -> None:
        """The process died and came back: no pages, no sequences, a new identity."""
        self.live, self.spills, self.orphans, self.step_id = {}, [], {}, 0
        self.generation, self.kept = 0, {}
        self.shadow = Shadow(self.page_tokens)
        self.incarnation = incarnation
        self.hello()

    def adopt(self, live: Live) -> Grant | Refusal:
        """Hand a sequence over to a state of the manager that does not know it."""
        return self.adopt_all([live])[0]

    def adopt_all(self, lives: Sequence[Live]) -> list[Grant | Refusal]:
        reply = self.step(adopts=[self.adopt_of(live) for live in lives])
        answers: dict[int, Grant | Refusal] = {
            answer.sequence_id: answer for answer in (*reply.grants, *reply.refusals)
        }
        for live in lives:
            answer = answers[live.id]
            if isinstance(answer, Refusal):
                self.forget(live)
            else:
                self._adopted(live, answer)
        return [answers[live.id] for live in lives]

    def _adopted(self, live: Live, grant: Grant) -> None:
        live.known_len, live.reported, live.snapshots, live.restored = len(live.tokens), live.computed, {}, True
        for pages in grant.tables:
            live.tables[pages.group] = {}
            self._set_pages(live, pages)
        live.room, live.adopted = live.computed, True
        live.working = {s.group: s.slot for s in grant.working}
        live.rolling = {s.group: s.slot for s in grant.rolling}
        live.grant = grant
        self._set_snapshots(live, grant.snapshots)
        self.check_reads(live, "an adoption")

    def adopt_of(self, live: Live) -> Adopt:
        tables = tuple(
            GroupPages(g, 0, array("I", self._owned(live, g)).tobytes())
            for g, spec in enumerate(self.groups)
            if spec.kind != GroupKind.STATE
        )
        slots = [
            tuple(StateSlot(g, boundary, PageId(s)) for g, s in held.items())
            for held, boundary in ((live.working, 0), (live.rolling, live.rolled))
        ]
        return Adopt(
            SequenceId(live.id),
            live.namespace,
            pack(live.tokens),
            live.computed,
            tables,
            slots[0],
            slots[1],
            live.priority,
            live.bypass,
        )

    def _owned(self, live: Live, group: int) -> list[int]:
        """Page ids that the lease still holds: behind a running window they may be anybody's."""
        spec, row = self.groups[group], live.table(group)
        if spec.kind == GroupKind.WINDOW:
            first = max(0, live.reported - (spec.window_tokens - 1)) // self.page_tokens
            row = [0] * min(first, len(row)) + row[first:]
        return row
