"""Where the services of `stemcache up` listen: options first, then variables, then the usual ports.

A variable that all workers read (STEMCACHE_WORKER_LISTEN) names the first one's port; worker n has that port + n - 1.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from rpc.address import MAX_PORT, HostPort, parse_address

LOOPBACK = "127.0.0.1"
CACHE_METRICS_PORT = 9400
WORKER_METRICS_PORT = 9500
ANY = HostPort(LOOPBACK, 0)
# Below those that Linux gives to connections, from 32,768 on.
FREE_PORTS = range(10_000, 20_000)


class CannotStart(Exception):
    """What was asked for is not possible on this machine; the text names the option or the variable."""


class Listens(NamedTuple):
    """One service's addresses; an empty string means not served."""

    calls: str
    admin: str
    metrics: str
    advertise: str = ""


class Wanted(NamedTuple):
    """An address, and the option or variable that set it.

    `fixed`: fail if its port is in use, instead of taking another.
    """

    name: str
    address: HostPort
    fixed: bool = True


class Ports:
    """Hands out each port once; a port of 0 becomes a free one."""

    def __init__(self) -> None:
        self._taken: set[int] = set()

    def take(self, wanted: Wanted) -> str:
        """Raises CannotStart when a fixed port is in use or beyond the last one."""
        name, (host, port), fixed = wanted
        if port > MAX_PORT:
            raise CannotStart(f"{name}: the last worker's port would be {port}, beyond {MAX_PORT}")
        if port in self._taken and fixed:
            raise CannotStart(f"{name}: {port} is another service's port already")
        if port and not is_free(host, port) and fixed:
            raise CannotStart(f"{name}: {HostPort(host, port)} is in use; give another port, or 0 for any free one")
        if not port or port in self._taken or not is_free(host, port):
            port = next(free for free in _free_ports() if free not in self._taken)
        self._taken.add(port)
        return str(HostPort(host, port))


def usual(port: int, asked_port: int) -> HostPort:
    """Returns the usual port of an endpoint beside a service; 0 (any free one) where the service itself takes any."""
    return HostPort(LOOPBACK, port if asked_port else 0)


class Chosen(NamedTuple):
    """The cache service's addresses, and the workers' in order."""

    cache: Listens
    workers: tuple[Listens, ...]


def choose(num_workers: int, cache_port: int | None, worker_port: int | None, environ: Mapping[str, str]) -> Chosen:
    """Returns the addresses. Ports of None leave it to the variable, else to 7400 and 7500. Raises CannotStart.

    Every fixed port is taken before any free one is drawn.
    """
    ports = Ports()
    cache_calls = _wanted("--cache-port", cache_port, "STEMCACHE_CACHE_LISTEN", 7400, environ)
    worker_calls = _wanted("--worker-port", worker_port, "STEMCACHE_WORKER_LISTEN", 7500, environ)
    cache_wants = [cache_calls, *_beside("STEMCACHE_CACHE", CACHE_METRICS_PORT, cache_calls, environ)]
    worker_wants = [worker_calls, *_beside("STEMCACHE_WORKER", WORKER_METRICS_PORT, worker_calls, environ)]
    wants = [*cache_wants, *(_plus(want, at) for at in range(num_workers) for want in worker_wants)]
    given: dict[int, str] = {}
    for number in sorted(range(len(wants)), key=lambda at: _order(wants[at])):
        want = wants[number]
        given[number] = "" if want is None else ports.take(want)
    advertise = environ.get("STEMCACHE_WORKER_ADVERTISE", "")
    threes = [[given[at + part] for part in range(3)] for at in range(0, len(wants), 3)]
    cache, *workers = (Listens(*three) for three in threes)
    return Chosen(cache, tuple(one._replace(advertise=_advertised(advertise, at)) for at, one in enumerate(workers)))


def _order(want: Wanted | None) -> tuple[bool, bool]:
    """Returns the sort key: fixed ones first, then those with a usual port, then any free ones."""
    return (want is None or not want.fixed, want is None or want.address.port == 0)


def _wanted(option: str, port: int | None, variable: str, usual_port: int, environ: Mapping[str, str]) -> Wanted:
    if port is not None:
        return Wanted(option, HostPort(LOOPBACK, port))
    text = environ.get(variable, "")
    return Wanted(variable, _parse(variable, text)) if text else Wanted(option, HostPort(LOOPBACK, usual_port))


def _beside(
    prefix: str, metrics_port: int, calls: Wanted, environ: Mapping[str, str]
) -> tuple[Wanted | None, Wanted | None]:
    """Returns the admin and the metrics address; None where a variable is set and empty."""
    return (
        _variable_or(f"{prefix}_ADMIN_LISTEN", ANY, environ),
        _variable_or(f"{prefix}_METRICS_LISTEN", usual(metrics_port, calls.address.port), environ),
    )


def _variable_or(variable: str, otherwise: HostPort, environ: Mapping[str, str]) -> Wanted | None:
    if variable not in environ:
        return Wanted(variable, otherwise, fixed=False)
    text = environ[variable]
    return Wanted(variable, _parse(variable, text)) if text else None


def _plus(want: Wanted | None, at: int) -> Wanted | None:
    if want is None or not want.address.port:
        return want
    return want._replace(address=want.address._replace(port=want.address.port + at))


def _advertised(text: str, at: int) -> str:
    if not text:
        return ""
    host, port = _parse("STEMCACHE_WORKER_ADVERTISE", text)
    return str(HostPort(host, port + at))


def _parse(variable: str, text: str) -> HostPort:
    try:
        return parse_address(text)
    except ValueError as error:
        raise CannotStart(f"{variable}: {error}") from None


def connectable(address: str) -> str:
    """Returns the address under which this machine reaches a service that listens here."""
    host, port = parse_address(address)
    return str(HostPort({"0.0.0.0": LOOPBACK, "::": "::1"}.get(host, host), port))  # noqa: S104 - compared, not bound


def free_port() -> int:
    """Returns a loopback port that is free now."""
    return next(_free_ports())


def _free_ports() -> Iterator[int]:
    """Yields loopback ports that are free now, drawn at random: what asks for one at the same time gets another.

    Not those that the system gives to connections: a service listens seconds later, and one may have its port by then.
    """
    for port in random.SystemRandom().sample(FREE_PORTS, len(FREE_PORTS)):
        if is_free(LOOPBACK, port):
            yield port
    raise CannotStart(f"no port from {FREE_PORTS.start} to {FREE_PORTS.stop - 1} is free")


def is_free(host: str, port: int) -> bool:
    """Returns whether a service could listen there; a host of another machine is left for the service to report."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        # As the services do: a port in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
