"""A value in parts in Redis: one hash, with a field for each part.

Written under a name of its own, which is renamed when the last part is there: half a value is never found. As one key
it expires, is renewed and is deleted whole. Redis copies one part at a time, so that a large value holds up no other
client: to read a string of 233 MiB did for 110 ms, a part of 4 MiB for 7.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence

from tier_client.errors import ErrorReply, HostTierError
from tier_client.resp import Buffer, RespConnection, encode_command

# Parts that are asked for before the first of them was read: Redis copies each into its output.
IN_FLIGHT = 2
# What a writer that died leaves behind ends after this; each part prolongs it.
UNFINISHED_MS = 60_000
_REPLY_BYTES = 64


def store_parts(
    connection: RespConnection, key: bytes, parts: Iterable[Sequence[Buffer]], ttl_ms: int, arm: Callable[[], None]
) -> bool:
    """Stores a value under `key`, each part as it comes. Returns False when the store is full.

    `arm` sets the deadline of what follows up to the next call of it.
    """
    name = b"%b:%b" % (key, secrets.token_hex(8).encode())
    num_sent = num_read = 0
    is_stored = True
    for buffers in parts:
        arm()
        connection.send(_part_command(name, num_sent, buffers))
        num_sent += 1
        if num_sent - num_read == IN_FLIGHT:
            is_stored = _read_part_stored(connection)
            num_read += 1
        if not is_stored:
            break
    arm()
    for _ in range(num_sent - num_read):
        is_stored = _read_part_stored(connection) and is_stored
    if not is_stored:
        connection.command(b"UNLINK", name)
        return False
    _finish(connection, name, key, num_sent, ttl_ms)
    return True


def read_parts(
    connection: RespConnection, key: bytes, num_parts: int, max_bytes: int, arm: Callable[[], None]
) -> Iterator[bytearray | None]:
    """Yields the parts in order; None for the first one that is absent or longer than `max_bytes`, and then no more."""
    asked = 0
    for number in range(num_parts):
        arm()
        while asked < min(number + IN_FLIGHT, num_parts):
            connection.send([encode_command(b"HGET", key, b"%d" % asked)])
            asked += 1
        value = read_found(connection, max_bytes)
        if value is None:
            for _ in range(number + 1, asked):
                read_found(connection, max_bytes)
            yield None
            return
        yield value


def read_found(connection: RespConnection, max_bytes: int) -> bytearray | None:
    """Returns the value; a key of another type counts as absent."""
    try:
        return connection.read_value(max_bytes)
    except ErrorReply as error:
        if error.code != "WRONGTYPE":
            raise
        return None


def read_stored(connection: RespConnection) -> bool:
    """Reads a reply to a write. Returns False when the store is full; any other error reply is raised."""
    try:
        connection.read_value(_REPLY_BYTES)
    except ErrorReply as error:
        if error.code != "OOM":
            raise
        return False
    return True


def _part_command(name: bytes, number: int, buffers: Sequence[Buffer]) -> list[Buffer]:
    # The part comes last, so that Redis can read it straight into a string.
    size = sum(memoryview(buffer).nbytes for buffer in buffers)
    field = b"%d" % number
    head = b"*4\r\n$4\r\nHSET\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, len(field), field, size)
    return [head, *buffers, b"\r\n", encode_command(b"PEXPIRE", name, b"%d" % UNFINISHED_MS)]


def _read_part_stored(connection: RespConnection) -> bool:
    is_stored = read_stored(connection)
    connection.read_value(_REPLY_BYTES)  # of PEXPIRE
    return is_stored


def _finish(connection: RespConnection, name: bytes, key: bytes, num_parts: int, ttl_ms: int) -> None:
    if bytes(connection.command(b"HLEN", name) or b"") != b"%d" % num_parts:
        raise HostTierError("parts vanished from the store as they were written")
    connection.command(b"PEXPIRE", name, b"%d" % ttl_ms)
    connection.command(b"RENAME", name, key)
