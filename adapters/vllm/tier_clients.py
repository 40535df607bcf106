"""Clients of the tier that the connector's settings name."""

from __future__ import annotations

from adapters.vllm.layout import Layout
from adapters.vllm.settings import Settings
from tier_client.breaker import Breaker
from tier_client.calls import HostTierCalls
from tier_client.client import TierClient
from tier_client.page_store import PageStore
from tier_client.redis_tier import RedisTier, RedisTierConfig
from tier_client.values import PageGroup


def make_index(
    settings: Settings, layout: Layout, num_ranks: int, *, engine: str, fingerprint: bytes, model: str
) -> HostTierCalls:
    """Returns the client; the first call attaches. `engine` and `model` are names, `fingerprint` has 32 bytes."""
    config = settings.client_config(
        engine=engine,
        model=model,
        fingerprint=fingerprint,
        page_tokens=layout.page_tokens,
        groups=_groups(layout),
        num_ranks=num_ranks,
        num_connections=1,
        compute_tokens_per_s=settings.compute_tokens_per_s,
    )
    return TierClient(config).calls


def make_store(settings: Settings, layout: Layout, rank: int) -> PageStore:
    num_connections = settings.load_threads + settings.save_threads
    tier = RedisTier(settings.redis, RedisTierConfig(num_connections, settings.store_timeout_s))
    replicated = [number for number, group in enumerate(layout.groups) if group.replicated]
    return PageStore(
        tier,
        rank,
        Breaker(settings.pause_s),
        settings.transfer_timeout_s,
        part_bytes=settings.host_part_kb << 10,
        replicated=replicated,
    )


def _groups(layout: Layout) -> tuple[PageGroup, ...]:
    """Returns the groups, named by their numbers: which layers they have is in the fingerprint."""
    return tuple(
        PageGroup(
            f"{group.kind.name.lower()}{number}", group.kind, group.page_bytes, group.window_tokens, group.replicated
        )
        for number, group in enumerate(layout.groups)
    )
