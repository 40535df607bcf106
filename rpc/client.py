"""Opens client channels whose limits match our servers'.

Callers make their stubs on the channel.
"""

from __future__ import annotations

import grpc.aio

from rpc.options import channel_options


def open_channel(address: str, max_message_bytes: int) -> grpc.aio.Channel:
    """Returns a channel to `host:port` that connects at its first use; close it, or use it in `async with`."""
    return grpc.aio.insecure_channel(address, options=channel_options(max_message_bytes))
