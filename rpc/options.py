"""Channel and server arguments that must agree on both ends of a connection.

The greatest message is an argument here: it is decided in session/limits.py.
"""

from __future__ import annotations

from typing import NamedTuple

KEEPALIVE_MS = 10_000
KEEPALIVE_TIMEOUT_MS = 5_000

Options = list[tuple[str, int | str]]


class ServerLimits(NamedTuple):
    """Limits of a server."""

    max_message_bytes: int
    max_streams_per_connection: int = 1024
    max_concurrent_calls: int = 4096
    max_pending_calls: int = 16_384


def _common(max_message_bytes: int) -> Options:
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        # A ping without a reply ends the connection after this time and no sooner. Its default of 60 s would
        # count for a frozen peer, whose kernel still acknowledges what we send.
        ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        # An idle worker still has to notice within seconds that its peer is gone.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def server_options(limits: ServerLimits) -> Options:
    return [
        *_common(limits.max_message_bytes),
        # Without this two servers may share one port, and a client would reach either of them.
        ("grpc.so_reuseport", 0),
        ("grpc.max_concurrent_streams", limits.max_streams_per_connection),
        # Calls that came in and that no handler has taken yet. From the first number on gRPC cancels some, from the
        # second on all, and the peer sees a bare CANCELLED. Its defaults are 1,000 and 3,000, which 6,000 streams at
        # once exceed; a call that we take can be refused with RESOURCE_EXHAUSTED.
        ("grpc.server.max_pending_requests", limits.max_pending_calls),
        ("grpc.server.max_pending_requests_hard_limit", 2 * limits.max_pending_calls),
        # Half of what our channels ping at, so that an honest client is never taken for a flood.
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
    ]


def channel_options(max_message_bytes: int) -> Options:
    return [
        *_common(max_message_bytes),
        # A restarted peer must be found again within a second, not after gRPC's default backoff of up to two minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1_000),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        # Channels to one address otherwise share a connection: every new channel would find a damaged one again.
        ("grpc.use_local_subchannel_pool", 1),
    ]
