"""The cache service's settings: one frozen dataclass, filled from flags and STEMCACHE_CACHE_* variables.

Bootstrap turns settings into what the parts take.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cache_service.core.base.manager_config import ManagerConfig
from cache_service.core.base.types import FetchPolicy, SpillPolicy
from cache_service.core.device.eviction_order import POLICIES
from rpc.address import parse_address
from rpc.logs import LEVELS
from rpc.settings import SettingsError, load, setting
from session.limits import MAX_MESSAGE_BYTES
from session.redis_url import RedisUrlError, parse_redis_url

ENV_PREFIX = "STEMCACHE_CACHE_"
SPILLS = tuple(policy.value for policy in SpillPolicy)
FETCHES = tuple(policy.value for policy in FetchPolicy)
# Where the manager has a default, it is the setting's, too.
MANAGER = ManagerConfig()


@dataclass(frozen=True, slots=True)
class CacheConfig:
    listen: str = setting("127.0.0.1:7400", "Address to serve PrefixCache on; port 0 takes a free one.")
    admin_listen: str = setting(
        "127.0.0.1:7480", "Address to serve CacheAdmin (Pin, Clear) on; port 0 takes a free one, empty: nowhere."
    )
    metrics_listen: str = setting("", "Address of the Prometheus endpoint; empty: none.")
    redis_url: str = setting(
        "", "redis://user:password@host:port/db of the shared host tier, for its keys.", secret=True
    )
    policy: str = setting(MANAGER.policy, "Which pages are evicted first.", choices=tuple(POLICIES))
    spill: str = setting(MANAGER.spill.value, "Which pages go to the host tier, and when.", choices=SPILLS)
    fetch: str = setting(MANAGER.fetch.value, "When host copies are fetched instead of recomputed.", choices=FETCHES)
    host_quota_mb: int = setting(
        MANAGER.host_quota_bytes >> 20, "Bytes that the host tier may hold, in MiB.", minimum=1
    )
    host_ttl_s: int = setting(MANAGER.host_ttl_ms // 1000, "Life of a value in Redis after its last use.", minimum=1)
    grace_ms: int = setting(
        MANAGER.grace_ms, "How long a worker may be gone before its leases and pages are forgotten.", minimum=0
    )
    max_attachments: int = setting(
        MANAGER.max_attachments, "Engines that may be attached to the host tier by HostTier at once.", minimum=1
    )
    attachment_idle_s: int = setting(
        MANAGER.attachment_idle_ms // 1000, "Silence of an attached engine that ends its attachment.", minimum=1
    )
    host_lease_s: int = setting(
        MANAGER.host_lease_ms // 1000, "How long a lease of an attached engine holds host rows.", minimum=1
    )
    max_live_sequences: int = setting(MANAGER.max_live_sequences, "Leases of one worker.", minimum=1)
    max_sequence_tokens: int = setting(
        MANAGER.max_sequence_tokens,
        "Tokens of one sequence, prompt and answer together.",
        minimum=1,
        maximum=16_000_000,
    )
    max_adopt_pages: int = setting(
        MANAGER.max_adopt_pages,
        "Pages that one Step may adopt: 2 us of the event loop each, 5 with watchers.",
        minimum=1,
    )
    max_kept_mb: int = setting(
        MANAGER.max_kept_bytes >> 20,
        "Tokens of one worker's waiting prompts that are kept, in MiB; 0: none.",
        minimum=0,
        maximum=4096,
    )
    max_open_tickets: int = setting(
        MANAGER.max_open_tickets, "Transfers of one worker that may be under way.", minimum=1
    )
    transfer_pages: int = setting(MANAGER.transfer_pages, "Pages of one spill order.", minimum=1)
    ghost_factor: int = setting(
        MANAGER.ghost_factor, "Evicted pages remembered, in sizes of the pool.", minimum=0, maximum=4
    )
    write_back_low_water: float = setting(
        MANAGER.write_back_low_water, "Free share of a pool below which write_back spills.", minimum=0, maximum=1
    )
    max_pinned_share: float = setting(
        MANAGER.max_pinned_share,
        "Share of a worker's pages that Pin calls may have evicted last.",
        minimum=0,
        maximum=1,
    )
    max_spill_s: int = setting(
        MANAGER.max_spill_ms // 1000, "Time after which a transfer that is not acknowledged has failed.", minimum=1
    )
    max_lease_mb: int = setting(
        MANAGER.max_lease_bytes >> 20, "Tokens that one worker's sequences may hold, in MiB.", minimum=1
    )
    max_total_lease_mb: int = setting(
        MANAGER.max_total_lease_bytes >> 20,
        "Tokens that the sequences of all workers may hold together, in MiB.",
        minimum=1,
    )
    breaker_failures: int = setting(
        MANAGER.breaker_failures, "Failures in a row that stop fetches, or a worker's spills.", minimum=1
    )
    breaker_ms: int = setting(MANAGER.breaker_ms, "How long they stay stopped.", minimum=1)
    watch: bool = setting(True, "Whether Watch is served.")
    max_watchers: int = setting(64, "Watch streams at once.", minimum=0)
    watch_queue: int = setting(4096, "Events that one watcher may lag behind.", minimum=1)
    watch_queue_mb: int = setting(16, "Size of those events together, in MiB.", minimum=1)
    max_present_states: int = setting(
        2, "Watchers at once that are being told what is cached already; more are refused.", minimum=0
    )
    max_workers: int = setting(
        MANAGER.max_workers, "Workers known at once, connected or in their grace period.", minimum=1
    )
    max_sessions: int = setting(MANAGER.max_workers, "Session streams at once.", minimum=1)
    hello_timeout_s: float = setting(10.0, "Silence of a new stream that ends it.", minimum=0.01)
    write_timeout_s: float = setting(30.0, "Time after which a peer that reads nothing is cut off.", minimum=0.01)
    call_timeout_s: float = setting(10.0, "The most time that a unary call may take.", minimum=0.01)
    max_message_mb: int = setting(
        MAX_MESSAGE_BYTES >> 20, "Size of one message, in MiB.", minimum=1, maximum=MAX_MESSAGE_BYTES >> 20
    )
    max_pin_ms: int = setting(86_400_000, "The longest that Pin may ask for.", minimum=1)
    tick_ms: int = setting(100, "Time between two ticks of the manager.", minimum=1)
    drain_timeout_s: float = setting(5.0, "Time that calls get to finish at the end.", minimum=0.0)
    log_level: str = setting("info", "Least severity that is logged.", choices=LEVELS)

    def __post_init__(self) -> None:
        for name in ("listen", "admin_listen", "metrics_listen"):
            text = getattr(self, name)
            if text or name == "listen":
                _check_address(name, text)
        if self.redis_url:
            _check_redis_url(self.redis_url)


def _check_address(name: str, text: str) -> None:
    try:
        parse_address(text)
    except ValueError as error:
        raise SettingsError(name, str(error)) from error


def _check_redis_url(url: str) -> None:
    """Holds the URL to the workers' rules: redis-py takes more, and connects elsewhere than was meant."""
    try:
        parse_redis_url(url)
    except RedisUrlError as error:
        raise SettingsError("redis_url", error.reason) from None


def load_config(arguments: Sequence[str], environment: Mapping[str, str]) -> CacheConfig:
    return load(CacheConfig, ENV_PREFIX, arguments, environment, prog="python -m cache_service")
