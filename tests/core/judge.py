"""Is an answer to an acquire the one that the oracle forecast?"""

from __future__ import annotations

from session.messages import Refusal
from session.words import GroupKind, HostTierKind, RefusalReason
from tests.core.driver import FakeWorker
from tests.core.oracle import Forecast, Oracle
from tests.core.world import Live


def judge_refusal(worker: FakeWorker, refusal: Refusal, forecast: Forecast, blurred: bool) -> None:
    if refusal.reason == RefusalReason.NEVER_FITS:
        assert not forecast.fits_empty, "it would fit into an empty worker"
        return
    assert forecast.fits_empty
    assert worker.live or worker.spills or worker.orphans, "an idle worker refused what could fit"
    assert worker.spills or blurred or not forecast.room, "there was room"


def judge_grant(oracle: Oracle, live: Live, forecast: Forecast, free: list[int]) -> None:
    assert forecast.fits_empty
    match = live.grant.match
    fulls = [g for g, spec in enumerate(oracle.specs) if spec.kind == GroupKind.FULL]
    if live.fetch is None and oracle.worker.host_tier == HostTierKind.NONE:
        assert match.usable_tokens == forecast.usable
        assert not fulls or match.matched_tokens == forecast.matched
        if forecast.room:
            assert live.grant.usable_tokens == forecast.usable
        else:
            assert live.grant.usable_tokens < forecast.usable, "a grant without room"
    if fulls and free and forecast.room and live.grant.usable_tokens == forecast.usable and live.fetch is None:
        missing = max(max(0, forecast.need[g] - free[g]) for g in fulls)
        removed = oracle.removed
        assert all(len(removed[g]) == missing for g in fulls), "more or fewer pages went than were missing"
