"""Where the services are: what an option names, else the environment, else what `stemcache up` runs here."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import typer

from cli.app import fail
from cli.run_file import RunRecord, read_record
from rpc.address import parse_address

CACHE_VARIABLE = "STEMCACHE_CACHE"
ADMIN_VARIABLE = "STEMCACHE_ADMIN"
# Addresses with commas between; those that do not reply are left out, so that one value serves several deployments.
WORKERS_VARIABLE = "STEMCACHE_WORKERS"


def check_address(option: str, address: str) -> str:
    """Returns the address. Ends the command when it is not host:port."""
    try:
        parse_address(address)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None
    return address


def cache_from_environment() -> str:
    """Returns the addresses in the environment; empty when it names none."""
    address = os.environ.get(CACHE_VARIABLE, "")
    return address and check_address(CACHE_VARIABLE, address)


def workers_from_environment() -> tuple[str, ...]:
    names = os.environ.get(WORKERS_VARIABLE, "").split(",")
    return tuple(check_address(WORKERS_VARIABLE, name.strip()) for name in names if name.strip())


def find_cache(given: str) -> str:
    """Returns one address; ends the command when there is none."""
    if given:
        return check_address("--cache", given)
    return cache_from_environment() or _record("no cache service", "start one", "it with --cache host:port").cache


def find_admin(given: str) -> str:
    """Returns the admin address of the cache service; ends the command when none is known."""
    if given:
        return check_address("--admin", given)
    if address := os.environ.get(ADMIN_VARIABLE, ""):
        return check_address(ADMIN_VARIABLE, address)
    return _record("no cache service", "start one", "its admin address with --admin host:port").cache_admin


def find_workers(given: str) -> tuple[str, ...]:
    """Returns the given address alone, else those of all workers; ends the command when there are none."""
    if given:
        return (check_address("--worker", given),)
    return workers_from_environment() or _record("no worker", "start some", "one with --worker host:port").workers


def find_worker_admin(worker: str) -> str:
    """Returns a worker's admin address; `worker` is one, or the name of a worker of `stemcache up` here."""
    if ":" in worker:
        return check_address("WORKER", worker)
    admins = _record("no worker", "start some", "a worker's admin address").worker_admins
    by_name = {f"worker-{number}": admin for number, admin in enumerate(admins, 1)}
    if not by_name.get(worker):
        fail(f"{worker}: no such worker here; {', '.join(by_name)} are, or name an admin address (host:port)")
    return by_name[worker]


def cache_of_workers(given: str) -> str:
    """Returns the cache service to ask where a prompt is cached; empty when a worker was given, or none is known."""
    if given:
        return ""
    record = read_record()
    return cache_from_environment() or (record.cache if record and not workers_from_environment() else "")


def _record(what: str, start: str, name: str) -> RunRecord:
    record = read_record()
    if record is None:
        fail(f"{what} is running here; {start} with `{command_name()} up` in this folder, or name {name}")
    return record


def command_name() -> str:
    """Returns how to type the command: its path, unless PATH has it."""
    if shutil.which("stemcache"):
        return "stemcache"
    own = Path(sys.executable).parent / "stemcache"
    if not own.exists():
        return f"{sys.executable} -m cli"
    try:
        return str(own.relative_to(Path.cwd()))
    except ValueError:
        return str(own)
