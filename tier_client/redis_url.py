"""The address of a Redis and its credentials, from a redis://, rediss:// or unix:// URL.

Opens no connection. Its text form never shows the password, so that it may be logged.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from tier_client.errors import RedisUrlError

DEFAULT_PORT = 6379
SCHEMES = ("redis", "rediss", "unix")


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """A TCP address, or the path of a unix socket."""

    host: str = ""
    port: int = 0
    unix_path: str = ""
    username: str = ""
    password: str = field(default="", repr=False)
    database: int = 0
    tls: bool = False

    def __str__(self) -> str:
        user = f"{self.username}@" if self.username else ""
        if self.unix_path:
            return f"unix://{user}{self.unix_path}?db={self.database}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'rediss' if self.tls else 'redis'}://{user}{host}:{self.port}/{self.database}"


def parse_redis_url(url: str) -> RedisAddress:
    """Returns the address that a URL names. Raises RedisUrlError."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        # urlsplit may quote the authority, which holds the password; the cause is dropped for the same reason.
        reason = "the port is not a number in 0..65535" if "ort" in str(error) else "it cannot be parsed"
        raise RedisUrlError(f"redis url: {reason}") from None
    if parts.scheme not in SCHEMES:
        raise RedisUrlError(f"redis url: the scheme is one of redis://, rediss://, unix://, not {parts.scheme!r}")
    if parts.fragment:
        raise RedisUrlError("redis url: a '#' must be written as %23")
    username, password = unquote(parts.username or ""), unquote(parts.password or "")
    if parts.scheme == "unix":
        return _unix_address(parts, username, password)
    if not parts.hostname:
        raise RedisUrlError("redis url: the host is missing")
    if port == 0:
        raise RedisUrlError("redis url: port 0 cannot be connected to")
    if parts.query:
        raise RedisUrlError("redis url: options after '?' are known for unix:// only")
    return RedisAddress(
        host=unquote(parts.hostname),
        port=port or DEFAULT_PORT,
        username=username,
        password=password,
        database=_database(parts.path.removeprefix("/")),
        tls=parts.scheme == "rediss",
    )


def _unix_address(parts: SplitResult, username: str, password: str) -> RedisAddress:
    if not parts.path:
        raise RedisUrlError("redis url: the path of the unix socket is missing")
    options = parse_qs(parts.query)
    if unknown := sorted(set(options) - {"db"}):
        raise RedisUrlError(f"redis url: unknown option {unknown[0]!r}")
    return RedisAddress(
        unix_path=unquote(parts.path),
        username=username,
        password=password,
        database=_database(options.get("db", [""])[0]),
    )


def _database(text: str) -> int:
    if not text:
        return 0
    if not (text.isascii() and text.isdigit()):
        raise RedisUrlError(f"redis url: the database is a number, not {text!r}")
    return int(text)
