"""A server on loopback that says what a test wrote down: for replies that a healthy Redis never gives.

Reads and throws away what clients send; knows no commands.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Sequence
from types import TracebackType


class ScriptedServer:
    """Each connection gets the next script: byte strings, one sent after each piece that the client sends."""

    def __init__(
        self, scripts: Sequence[Sequence[bytes]], hold_open: bool = True, tls: ssl.SSLContext | None = None
    ) -> None:
        self._scripts = list(scripts)
        self._hold_open = hold_open
        self._tls = tls
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._connections: list[socket.socket] = []
        self.num_connections = 0
        self._thread = threading.Thread(target=self._serve, daemon=True)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def _serve(self) -> None:
        for script in self._scripts:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.num_connections += 1
            self._play(connection, script)

    def _play(self, connection: socket.socket, script: Sequence[bytes]) -> None:
        try:
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_side=True)
            self._connections.append(connection)
            for reply in script:
                if not connection.recv(1 << 20):
                    return
                connection.sendall(reply)
        except OSError:
            return
        finally:
            if not self._hold_open:
                connection.close()

    def __enter__(self) -> ScriptedServer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # shutdown wakes up a thread that waits in accept or recv; close alone would not.
        for waiting in (self._listener, *self._connections):
            with contextlib.suppress(OSError):
                waiting.shutdown(socket.SHUT_RDWR)
            waiting.close()
        self._thread.join(10)
        assert not self._thread.is_alive()
