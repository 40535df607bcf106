"""The address of a Redis and its credentials, from a redis://, rediss:// or unix:// URL.

Both services and clients hold URLs to the same rules: a URL that two of them read differently would be two stores.
Opens no connection. Neither its text form nor an error shows the password, so that both may be logged.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from session.errors import FieldError

DEFAULT_PORT = 6379
SCHEMES = ("redis", "rediss", "unix")


class RedisUrlError(FieldError):
    """The URL cannot be used. The message says why and quotes no part of it: any part may be one of the password."""

    def __init__(self, reason: str) -> None:
        super().__init__("redis_url", reason)


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
        url.encode()
    except UnicodeEncodeError:
        raise RedisUrlError("must be UTF-8") from None
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        # urlsplit may quote the authority, which holds the password; the cause is dropped for the same reason.
        reason = "the port is not a number in 0..65535" if "ort" in str(error) else "it cannot be parsed"
        raise RedisUrlError(reason) from None
    if parts.scheme not in SCHEMES:
        raise RedisUrlError("must start with redis://, rediss:// or unix://")
    if parts.fragment:
        raise RedisUrlError("a '#' must be written as %23")
    username, password = unquote(parts.username or ""), unquote(parts.password or "")
    if parts.scheme == "unix":
        return _unix_address(parts, port, username, password)
    if not parts.hostname:
        raise RedisUrlError("the host is missing")
    if port == 0:
        raise RedisUrlError("port 0 cannot be connected to")
    if parts.query:
        raise RedisUrlError("options after '?' are known for unix:// only; a password goes before '@'")
    return RedisAddress(
        host=unquote(parts.hostname),
        port=port or DEFAULT_PORT,
        username=username,
        password=password,
        database=_database(parts.path.removeprefix("/")),
        tls=parts.scheme == "rediss",
    )


def _unix_address(parts: SplitResult, port: int | None, username: str, password: str) -> RedisAddress:
    if parts.hostname or port is not None:
        # As a password with a "/" is read, too: its rest would be the path.
        raise RedisUrlError("there is no host in a unix:// URL; a '/' in a password must be written as %2F")
    if not parts.path:
        raise RedisUrlError("the path of the unix socket is missing")
    options = parse_qs(parts.query, keep_blank_values=True)
    if set(options) - {"db"}:
        raise RedisUrlError("unknown option: unix:// takes db only")
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
        # Behind an unescaped "/" of a password this is the password's rest.
        raise RedisUrlError("the database is a number; a '/' in a password must be written as %2F")
    return int(text)
