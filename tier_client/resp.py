"""One connection to a Redis, built for large values: buffers leave by gathered writes, values land where they stay.

A connection that failed half-way through a reply cannot be trusted again: it closes itself, and `usable` says so.
"""

from __future__ import annotations

import socket
import ssl
import struct
import time
from collections.abc import Sequence

from session.redis_url import RedisAddress
from tier_client.errors import ErrorReply, HostTierError, TooLongReply

SOCKET_BUFFER_BYTES = 4 << 20
READ_AHEAD_BYTES = 4096
MAX_LINE_BYTES = 4096
MAX_BUFFERS_PER_SEND = 512  # below every system's IOV_MAX
MIN_TIMEOUT_S = 0.001  # zero would mean not to wait at all, which is another kind of socket

Buffer = bytes | bytearray | memoryview


class RespConnection:
    """Sends commands and reads their replies in order; every call ends by its deadline or raises a HostTierError."""

    def __init__(self, address: RedisAddress, timeout_s: float) -> None:
        self.usable = False
        self._deadline = time.monotonic() + timeout_s
        self._buffer = bytearray(READ_AHEAD_BYTES)
        self._start = self._end = 0
        try:
            self._socket = _connect(address, max(timeout_s, MIN_TIMEOUT_S))
        except (OSError, ssl.SSLError, ValueError) as error:  # a ValueError for names that no host can have
            raise HostTierError(f"cannot connect to {address}: {error}") from error
        self._tls = isinstance(self._socket, ssl.SSLSocket)
        self.usable = True
        try:
            self._greet(address)
        except ErrorReply as error:
            self.close()
            # The server's own words for a wrong password or database; they never repeat the password.
            raise HostTierError(f"{address} refused the connection: {error}") from None

    def _greet(self, address: RedisAddress) -> None:
        if address.password or address.username:
            user = [address.username.encode()] if address.username else []
            self.command(b"AUTH", *user, address.password.encode())
        if address.database:
            self.command(b"SELECT", b"%d" % address.database)

    def close(self) -> None:
        self.usable = False
        self._socket.close()

    def is_clean(self) -> bool:
        """Returns whether the idle connection is open and holds no unread bytes."""
        if not self.usable or self._start != self._end:
            return False
        if self._tls:
            return True  # TLS records of its own may be waiting; a lost connection shows at the next command
        try:
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def arm(self, timeout_s: float) -> None:
        """Sets the deadline of everything up to the next call of this."""
        self._deadline = time.monotonic() + timeout_s

    def command(self, *arguments: bytes, max_bytes: int = MAX_LINE_BYTES) -> bytearray | None:
        """Sends one small command and returns its reply: a status, an integer or a value as bytes, or None."""
        self.send([encode_command(*arguments)])
        return self.read_value(max_bytes)

    # Writing

    def send(self, buffers: Sequence[Buffer]) -> None:
        """Sends all the buffers, in order, without joining them."""
        try:
            if self._tls:
                self._send_tls(buffers)
            else:
                self._send_gathered(buffers)
        except OSError as error:
            raise self._broken("sending", error) from error

    def _send_tls(self, buffers: Sequence[Buffer]) -> None:
        for buffer in buffers:
            self._set_timeout(socket.SO_SNDTIMEO)
            self._socket.sendall(buffer)

    def _send_gathered(self, buffers: Sequence[Buffer]) -> None:
        views = [view for buffer in buffers if (view := memoryview(buffer).cast("B")).nbytes]
        first = 0
        while first < len(views):
            self._set_timeout(socket.SO_SNDTIMEO)
            sent = self._socket.sendmsg(views[first : first + MAX_BUFFERS_PER_SEND])
            while first < len(views) and sent >= views[first].nbytes:
                sent -= views[first].nbytes
                first += 1
            if sent:
                views[first] = views[first][sent:]

    # Reading

    def read_value(self, max_bytes: int) -> bytearray | None:
        """Returns the next reply. Raises ErrorReply for an error reply, TooLongReply for a value beyond `max_bytes`."""
        line = self._read_line()
        kind, rest = bytes(line[:1]), line[1:]
        if kind in (b"+", b":"):
            return rest
        if kind == b"-":
            raise ErrorReply(rest.decode("utf-8", "replace"))
        if kind != b"$" or not rest.lstrip(b"-").isdigit():
            raise self._broken("reading", ValueError(f"unexpected reply {bytes(line[:32])!r}"))
        size = int(rest)
        if size < 0:
            return None
        if size > max_bytes:
            self.close()
            raise TooLongReply(f"a value of {size} bytes, where at most {max_bytes} are expected")
        return self._read_bulk(size)

    def _read_bulk(self, size: int) -> bytearray:
        # Zeroed first, and a fifth faster for it: the copy out of the kernel then meets warm cache lines.
        value = bytearray(size)
        with memoryview(value) as view:
            taken = min(size, self._end - self._start)
            view[:taken] = memoryview(self._buffer)[self._start : self._start + taken]
            self._start += taken
            while taken < size:
                taken += self._receive(view[taken:])
        while self._end - self._start < 2:
            self._read_ahead()
        if self._buffer[self._start : self._start + 2] != b"\r\n":
            raise self._broken("reading", ValueError("a value does not end where it should"))
        self._start += 2
        return value

    def _read_line(self) -> bytearray:
        while (stop := self._buffer.find(b"\r\n", self._start, self._end)) < 0:
            if self._end - self._start >= MAX_LINE_BYTES:
                raise self._broken("reading", ValueError("a reply line is too long"))
            self._read_ahead()
        line = self._buffer[self._start : stop]
        self._start = stop + 2
        return line

    def _read_ahead(self) -> None:
        """Reads a little more into the buffer: what is read here of a large value is copied once more."""
        pending = self._buffer[self._start : self._end]
        self._buffer[: len(pending)] = pending
        self._start, self._end = 0, len(pending)
        with memoryview(self._buffer) as view:
            self._end += self._receive(view[self._end :], whole=False)

    def _receive(self, view: memoryview, whole: bool = True) -> int:
        try:
            self._set_timeout(socket.SO_RCVTIMEO)
            # MSG_WAITALL fills the whole view in one system call, without waking up Python for each segment.
            count = self._socket.recv_into(view, 0, 0 if self._tls or not whole else socket.MSG_WAITALL)
        except OSError as error:
            raise self._broken("reading", error) from error
        if count == 0:
            raise self._broken("reading", ConnectionError("the server closed the connection"))
        return count

    def _set_timeout(self, option: int) -> None:
        """Sets the time left as the socket's timeout in the kernel, which needs no poll before each call."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("no reply in time")
        if self._tls:
            self._socket.settimeout(left)
        else:
            self._socket.setsockopt(socket.SOL_SOCKET, option, _timeval(left))

    def _broken(self, doing: str, error: Exception) -> HostTierError:
        self.close()
        reason = "no reply in time" if isinstance(error, BlockingIOError | TimeoutError) else str(error)
        return HostTierError(f"{doing}: {reason}")


def encode_command(*arguments: bytes) -> bytes:
    head = [b"*%d\r\n" % len(arguments)]
    return b"".join(head + [b"$%d\r\n%b\r\n" % (len(argument), argument) for argument in arguments])


def _connect(address: RedisAddress, timeout_s: float) -> socket.socket:
    if address.unix_path:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(timeout_s)
        try:
            connection.connect(address.unix_path)
        except OSError:
            connection.close()
            raise
    else:
        connection = socket.create_connection((address.host, address.port), timeout_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
    if address.tls:
        return ssl.create_default_context().wrap_socket(connection, server_hostname=address.host)
    connection.setblocking(True)
    return connection


def _timeval(seconds: float) -> bytes:
    # At least a microsecond: zero would mean no timeout.
    micros = max(1, int(seconds * 1e6))
    return struct.pack("@ll", micros // 1_000_000, micros % 1_000_000)
