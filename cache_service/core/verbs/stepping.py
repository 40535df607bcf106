"""Applies a Step to one worker's cache: acks, publishes, releases, shrinks, adopts, inventory, extends, then acquires.

Each item is checked right before it is applied: one that is wrong is refused alone, and changes nothing. Any other
exception in here is a fault of ours, and leaves the cache in no state to go on from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from cache_service.core.base.errors import DuplicateSequence
from cache_service.core.device_cache import DeviceCache
from cache_service.core.verbs import adoption, fetching, leasing, publishing, restoring, spilling, step_check
from cache_service.core.verbs.admission import never_fits
from session.errors import FieldError, InvalidInput, TooMany
from session.messages import (
    Ack,
    Acquire,
    Adopt,
    BadItem,
    BadRun,
    Extend,
    ExtendGrant,
    Grant,
    Inventory,
    Publish,
    Rates,
    Refusal,
    Release,
    Remap,
    RunRefusal,
    Shrink,
    Step,
    StepReply,
)
from session.words import PAGE_ID_BYTES, TOKEN_BYTES, RefusalReason, ReleaseReason, SequenceId

Item = TypeVar("Item", Publish, Release, Shrink, Adopt, Extend, Acquire)
Answer = TypeVar("Answer", Grant, ExtendGrant, Remap)


class _Reply:
    """Collects the results; a no_room bars every later acquire of the step."""

    def __init__(self) -> None:
        self.grants: list[Grant] = []
        self.extends: list[ExtendGrant] = []
        self.refusals: list[Refusal] = []
        self.remaps: list[Remap] = []
        self.run_refusals: list[RunRefusal] = []
        self.no_room = False

    def refuse(self, refusal: Refusal) -> None:
        self.refusals.append(refusal)
        self.no_room = self.no_room or refusal.reason is RefusalReason.NO_ROOM

    def apply(
        self,
        name: str,
        items: Sequence[Item | BadItem],
        verb: Callable[[Item], Answer | Refusal | None],
        answers: list[Answer],
        ended: frozenset[SequenceId] = frozenset(),
    ) -> None:
        """Applies each item in turn. Those of sequences that this very step has `ended` count as done."""
        seen: set[SequenceId] = set()
        for number, item in enumerate(items):
            sequence_id = item.sequence_id
            try:
                if isinstance(item, BadItem):
                    raise InvalidInput(item.field, item.reason)
                if sequence_id in seen:
                    raise DuplicateSequence("sequence_id", f"{sequence_id} is named twice")
                seen.add(sequence_id)
                if sequence_id in ended:
                    continue
                answer = verb(item)
            except FieldError as error:
                field = ".".join(filter(None, (f"step.{name}[{number}]", error.field)))
                self.refusals.append(Refusal(sequence_id, RefusalReason.INVALID, error.reason, field))
                continue
            if isinstance(answer, Refusal):
                self.refuse(answer)
            elif answer is not None:
                answers.append(answer)


def apply_step(cache: DeviceCache, step: Step, now_ms: int) -> StepReply:
    """Returns the reply. The step's acks must have passed `step_check.check_acks`."""
    cache.now_ms = now_ms
    reply = _Reply()
    if step.rates is not None:
        if not any(cache.rates):
            cache.transfers.fetched_ms = now_ms
        cache.rates = _merged(cache.rates, step.rates)
    for ack in step.acks:
        answer = acknowledge(cache, ack, now_ms)
        if isinstance(answer, Refusal):
            reply.refuse(answer)
        elif answer is not None:
            reply.grants.append(answer)
    # A refused replan ends its lease before the worker can know.
    ended = frozenset(refusal.sequence_id for refusal in reply.refusals)
    if step.publishes:
        reply.apply("publishes", step.publishes, partial(publish, cache), reply.remaps, ended)
    if step.releases:
        reply.apply("releases", step.releases, partial(release, cache, ended=ended), [])
    if step.shrinks:
        reply.apply("shrinks", step.shrinks, partial(shrink, cache), [], ended)
    if step.adopts:
        _apply_adopts(cache, step, reply)
    if step.inventory is not None:
        _apply_inventory(cache, step.inventory, reply)
    if step.extends:
        reply.apply("extends", step.extends, partial(extend, cache), reply.extends, ended)
    if step.acquires:
        reply.apply("acquires", step.acquires, lambda item: acquire(cache, item, barred=reply.no_room), reply.grants)
    free_pages = tuple([group.pool.num_free for group in cache.groups])
    return StepReply(
        step.step_id,
        tuple(reply.grants),
        tuple(reply.extends),
        tuple(reply.refusals),
        tuple(reply.remaps),
        free_pages,
        tuple(reply.run_refusals),
    )


def acknowledge(cache: DeviceCache, ack: Ack, now_ms: int) -> Grant | Refusal | None:
    """Applies an ack; a late or repeated one of a closed ticket changes nothing."""
    if ack.ticket in cache.transfers.fetches:
        lease = fetching.acknowledge(cache, ack, now_ms)
        if lease is not None:
            answer = leasing.plan_again(cache, lease)
            if isinstance(answer, Refusal):
                cache.kept.keep(lease.sequence_id, lease.prompt)
            return answer
    elif ack.ticket in cache.transfers.abandoned:
        spilling.forget_abandoned(cache, ack.ticket)
    elif ack.ticket in cache.transfers.spills:
        spilling.acknowledge(cache, ack, now_ms)
    return None


def publish(cache: DeviceCache, item: Publish) -> Remap | None:
    lease = step_check.check_publish(cache, item)
    return publishing.publish(cache, lease, item.tokens, item.computed_tokens)


def release(cache: DeviceCache, item: Release, *, ended: frozenset[SequenceId] = frozenset()) -> None:
    """Ends a lease, or drops the kept prompt of a sequence that waits for its acquire to be granted."""
    sequence_id = item.sequence_id
    if sequence_id not in cache.leases and (cache.kept.drop(sequence_id) or sequence_id in ended):
        return
    lease = step_check.check_release(cache, item)
    if item.reason is ReleaseReason.PREEMPTED:
        cache.kept.keep(lease.sequence_id, lease.tokens(0, lease.num_tokens * TOKEN_BYTES))
    leasing.release(cache, lease, item.reason, item.rolling_tokens)


def shrink(cache: DeviceCache, item: Shrink) -> None:
    leasing.shrink(cache, step_check.check_shrink(cache, item), item.num_tokens)


def extend(cache: DeviceCache, item: Extend) -> ExtendGrant | Refusal:
    return leasing.extend(cache, step_check.check_extend(cache, item), item)


def acquire(cache: DeviceCache, item: Acquire, *, barred: bool = False) -> Grant | Refusal:
    """Grants or refuses. `barred`: an earlier sequence of the same step had no room, so this one gets none either."""
    step_check.check_acquire(cache, item)
    if item.kept_tokens:
        head = cache.kept.head(item.sequence_id, item.kept_tokens)
        if head is None:
            detail = f"fewer than {item.kept_tokens} tokens of this sequence are kept"
            return Refusal(item.sequence_id, RefusalReason.RESEND, detail)
        item = item._replace(tokens=head + item.tokens if item.tokens else head, kept_tokens=0)
    answer = _barred(cache, item) if barred else leasing.acquire(cache, item)
    if isinstance(answer, Refusal) and answer.reason is RefusalReason.NO_ROOM:
        cache.kept.keep(item.sequence_id, item.tokens)
    else:
        cache.kept.drop(item.sequence_id)
    return answer


def _barred(cache: DeviceCache, acquire: Acquire) -> Refusal:
    detail = never_fits(cache, acquire)
    if detail is not None:
        return Refusal(acquire.sequence_id, RefusalReason.NEVER_FITS, detail)
    return Refusal(acquire.sequence_id, RefusalReason.NO_ROOM, "an earlier sequence of the step has no room")


def _apply_adopts(cache: DeviceCache, step: Step, reply: _Reply) -> None:
    """Applies adopts; one that is refused bars no acquire, since that says nothing of room."""
    num_pages, no_room = 0, reply.no_room

    def adopt(item: Adopt) -> Grant | Refusal:
        nonlocal num_pages
        named = sum(len(table.page_ids) for table in item.tables) // PAGE_ID_BYTES
        if num_pages and num_pages + named > cache.config.max_adopt_pages:
            reason = f"{num_pages + named} pages are adopted by one step; at most {cache.config.max_adopt_pages}"
            raise TooMany("tables", reason)
        num_pages += named
        return adoption.adopt(cache, item)

    reply.apply("adopts", step.adopts, adopt, reply.grants)
    reply.no_room = no_room


def _apply_inventory(cache: DeviceCache, inventory: Inventory, reply: _Reply) -> None:
    """Applies a part of the inventory; a run that is refused bars no acquire."""
    num_pages, most = 0, cache.config.max_adopt_pages
    for number, run in enumerate(inventory.runs):
        try:
            if isinstance(run, BadRun):
                raise InvalidInput(run.field, run.reason)
            num_pages += sum(map(len, run.page_ids)) // PAGE_ID_BYTES
            if num_pages > most:
                raise TooMany("page_ids", f"{num_pages} pages are named by the inventory of one step; at most {most}")
            refusal = restoring.restore(cache, run)
        except FieldError as error:
            field = ".".join(filter(None, (f"step.inventory.runs[{number}]", error.field)))
            refusal = RunRefusal(run.run, RefusalReason.INVALID, error.reason, field)
        if refusal is not None:
            reply.run_refusals.append(refusal)
    if inventory.is_complete:
        cache.restored.complete()


def _merged(known: Rates, measured: Rates) -> Rates:
    """Returns the rates with what was measured anew; 0 means unknown, and leaves the former value."""
    return Rates(
        measured.prefill_tokens_per_s or known.prefill_tokens_per_s,
        measured.fetch_bytes_per_s or known.fetch_bytes_per_s,
        measured.spill_bytes_per_s or known.spill_bytes_per_s,
    )
