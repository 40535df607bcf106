"""What the doctor checks of running services: which ones reply, with which model, and the Redis between them.

Changes nothing. The address of the Redis comes from a variable, or from the cache service's own process: with its
password it is in no file.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import grpc
from redis.asyncio import Redis
from redis.exceptions import RedisError

from cli.addresses import LOOPBACK, is_free
from cli.client import StemcacheClient
from cli.output import binary_size
from cli.places import cache_from_environment, command_name, workers_from_environment
from cli.run_file import read_record, state_dir
from protos.v1 import cache_pb2, worker_pb2
from rpc.logs import redact_url
from rpc.version import package_version

REDIS_VARIABLE = "STEMCACHE_CACHE_REDIS_URL"
REDIS_TIMEOUT_S = 2.0
USUAL_PORTS = (7400, 7500, 7501)
# Of a Redis' maxmemory; above it spills may begin to be refused.
FULL_SHARE = 0.95


class Finding(NamedTuple):
    """`ok` is False for what keeps Stemcache from working and None for what merely limits it."""

    what: str
    ok: bool | None
    seen: str
    advice: str = ""


async def look_at_services(cache: str) -> list[Finding]:
    """Checks the services of this cache address, else those that the environment names, else those of `stemcache up`
    here."""
    record = read_record()
    address = cache or cache_from_environment() or (record.cache if record else "")
    workers = () if cache else workers_from_environment() or (record.workers if record else ())
    if not address:
        return [Finding("services", None, "none running here", f"start them with `{command_name()} up`"), _ports()]
    url = "" if cache else os.environ.get(REDIS_VARIABLE, "") or (_url_of_child(record.pid) if record else "")
    async with StemcacheClient(address, workers) as client:
        found = await _cache(client)
        of_workers = await asyncio.gather(*(_worker(client, worker) for worker in workers))
    if record is None and any(worker[0].ok for worker in of_workers):
        # One value of the variable does for several profiles.
        advice = "not serving; maybe of a profile that is not in use"
        of_workers = [one if one[0].ok else [one[0]._replace(ok=None, advice=advice)] for one in of_workers]
    return [*found, *(finding for one in of_workers for finding in one), *(await _redis(url) if url else [])]


def _ports() -> Finding:
    taken = [port for port in USUAL_PORTS if not is_free(LOOPBACK, port)]
    if not taken:
        return Finding("ports", True, f"{', '.join(map(str, USUAL_PORTS))} are free")
    seen = f"{', '.join(map(str, taken))} in use by another program"
    return Finding("ports", None, seen, "`up --cache-port 0 --worker-port 0` takes free ones")


def _url_of_child(pid: int) -> str:
    """Returns the URL of the cache service that this supervisor started; empty where /proc does not tell."""
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            entries = Path(f"/proc/{child}/environ").read_bytes().decode(errors="replace").split("\0")
            values = dict(entry.split("=", 1) for entry in entries if "=" in entry)
            if url := values.get(REDIS_VARIABLE):
                return url
    return ""


async def _cache(client: StemcacheClient) -> list[Finding]:
    if not await client.is_serving(client.cache):
        return [Finding("cache service", False, client.cache, f"not serving{_logs()}")]
    stats = await client.stats()
    tier = stats.host_tier
    findings = [Finding("cache service", True, client.cache), *_version("the cache service", stats.version)]
    findings.append(_sessions(stats))
    if tier.breaker_open:
        advice = "Redis does not reply; serving goes on without it"
        findings.append(Finding("host tier", False, "the breaker is open", advice))
    if tier.num_corrupt_pages:
        seen = f"{tier.num_corrupt_pages:,} pages failed their checks"
        findings.append(Finding("host tier", None, seen, "they were recomputed; look at the Redis and the network"))
    return findings


def _sessions(stats: cache_pb2.StatsResponse) -> Finding:
    gone = [worker.worker_id for worker in stats.workers if not worker.connected]
    seen = f"{len(stats.workers) - len(gone)} connected"
    return Finding("sessions", not gone, seen, f"gone: {', '.join(gone)}" if gone else "")


def _version(name: str, found: str) -> list[Finding]:
    """Returns a note on another version than this command's own."""
    if found == package_version():
        return []
    seen = f"{name} is {found or 'of an older version'}, this command is {package_version()}"
    return [Finding("version", None, seen, "upgrade the older one; replies may lack what the newer one knows")]


async def _worker(client: StemcacheClient, address: str) -> list[Finding]:
    try:
        one = await client.describe(address)
    except grpc.RpcError:
        return [Finding("worker", False, address, f"not serving{_logs()}")]
    seen = f"{address}, {described(one)}"
    found = Finding("worker", not one.draining and bool(one.cache_epoch), seen, _trouble(one))
    return [found, *_version(one.worker_id, one.version)]


def _logs() -> str:
    """Returns a note on the logs of services of `stemcache up`."""
    return f"; see the logs in {state_dir() / 'logs'}" if read_record() else ""


def described(one: worker_pb2.DescribeResponse) -> str:
    """Returns a worker's name, its model and its device."""
    model = one.config.get("model", "") or one.model_type
    return f"{one.worker_id}: {model} in {one.dtype} on {one.device}, up to {one.max_model_len:,} tokens"


def _trouble(one: worker_pb2.DescribeResponse) -> str:
    if one.draining:
        return "it drains, and takes no requests"
    return "" if one.cache_epoch else "it has no session with the cache service"


async def _redis(url: str) -> list[Finding]:
    """Version, policy and memory of a Redis that runs."""
    try:
        async with Redis.from_url(
            url, socket_connect_timeout=REDIS_TIMEOUT_S, socket_timeout=REDIS_TIMEOUT_S
        ) as client:
            return [judge_redis(await client.info())]
    except (RedisError, OSError, ValueError) as error:
        reason = type(error).__name__
        return [
            Finding("Redis", False, f"{redact_url(url)} gives no reply ({reason})", "pages are not shared meanwhile")
        ]


def judge_redis(info: Mapping[str, object]) -> Finding:
    """Returns a finding on Redis' settings; `info` is the reply to INFO."""
    used, limit = int(str(info.get("used_memory", 0))), int(str(info.get("maxmemory", 0)))
    policy = str(info.get("maxmemory_policy", ""))
    memory = f"{binary_size(used)} of {binary_size(limit)}" if limit else f"{binary_size(used)}, no maxmemory"
    seen = f"{info.get('redis_version')}, {memory}, {policy}"
    if limit and used > FULL_SHARE * limit:
        return Finding(
            "Redis", None, seen, "nearly full: spills are refused; a larger maxmemory, or a smaller host quota"
        )
    if limit and policy != "noeviction":
        return Finding("Redis", None, seen, "maxmemory-policy noeviction keeps the index and Redis in step")
    if not limit:
        return Finding("Redis", None, seen, "set maxmemory a quarter above the host quota")
    return Finding("Redis", True, seen)
