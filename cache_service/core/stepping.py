"""Apply a checked Step to one worker's cache, in the order of its fields: acks, publishes, releases, extends, acquires.

Knows no session. Nothing in here raises: what can happen is a grant or a refusal.
"""

from __future__ import annotations

from cache_service.core import fetching, leasing, publishing, spilling
from cache_service.core.admission import never_fits
from cache_service.core.device_cache import DeviceCache
from cache_service.core.types import (
    Ack,
    Acquire,
    ExtendGrant,
    Grant,
    Rates,
    Refusal,
    RefusalReason,
    Remap,
    Step,
    StepReply,
    TransferStatus,
)


class _Reply:
    """Collects the answers; a no_room bars every later acquire of the step."""

    def __init__(self) -> None:
        self.grants: list[Grant] = []
        self.extends: list[ExtendGrant] = []
        self.refusals: list[Refusal] = []
        self.remaps: list[Remap] = []
        self.no_room = False

    def add(self, answer: Grant | ExtendGrant | Refusal | Remap | None) -> None:
        if isinstance(answer, Grant):
            self.grants.append(answer)
        elif isinstance(answer, ExtendGrant):
            self.extends.append(answer)
        elif isinstance(answer, Refusal):
            self.refusals.append(answer)
            self.no_room = self.no_room or answer.reason is RefusalReason.NO_ROOM
        elif answer is not None:
            self.remaps.append(answer)


def apply_step(cache: DeviceCache, step: Step, now_ms: int) -> StepReply:
    reply = _Reply()
    if step.rates is not None:
        cache.rates = _merged(cache.rates, step.rates)
    for ack in step.acks:
        reply.add(acknowledge(cache, ack, now_ms))
    for publish in step.publishes:
        lease = cache.leases.get(publish.sequence_id)
        if lease is not None:
            reply.add(publishing.publish(cache, lease, publish.tokens, publish.computed_tokens))
    for release in step.releases:
        lease = cache.leases.get(release.sequence_id)
        if lease is not None:  # a refused replan in this very step has ended it already
            leasing.release(cache, lease, release.reason)
    for extend in step.extends:
        lease = cache.leases.get(extend.sequence_id)
        if lease is not None:
            reply.add(leasing.extend(cache, lease, extend))
    for acquire in step.acquires:
        reply.add(_barred(cache, acquire) if reply.no_room else leasing.acquire(cache, acquire))
    return StepReply(
        step.step_id, tuple(reply.grants), tuple(reply.extends), tuple(reply.refusals), tuple(reply.remaps)
    )


def acknowledge(cache: DeviceCache, ack: Ack, now_ms: int) -> Grant | Refusal | None:
    """A closed ticket's late or repeated ack changes nothing."""
    if ack.ticket in cache.transfers.fetches:
        lease = fetching.acknowledge(cache, ack, now_ms)
        if lease is not None:
            return leasing.plan_again(cache, lease, may_fetch=ack.status is not TransferStatus.FAILED)
    elif ack.ticket in cache.transfers.spills:
        spilling.acknowledge(cache, ack, now_ms)
    return None


def _barred(cache: DeviceCache, acquire: Acquire) -> Refusal:
    detail = never_fits(cache, acquire)
    if detail:
        return Refusal(acquire.sequence_id, RefusalReason.NEVER_FITS, detail)
    return Refusal(acquire.sequence_id, RefusalReason.NO_ROOM, "an earlier sequence of the step has no room")


def _merged(known: Rates, measured: Rates) -> Rates:
    """Zero says unknown, which does not erase what was measured before."""
    return Rates(
        measured.prefill_tokens_per_s or known.prefill_tokens_per_s,
        measured.fetch_bytes_per_s or known.fetch_bytes_per_s,
    )
