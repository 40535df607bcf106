"""`python -m rpc.probe HOST:PORT`: exit code 0 when the server there says SERVING. For health checks of containers.

Checks the server as a whole, not one service.
"""

from __future__ import annotations

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rpc.health import SERVING

TIMEOUT_S = 5.0


def is_serving(address: str, timeout_s: float = TIMEOUT_S) -> bool:
    with grpc.insecure_channel(address) as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError:
            return False
    return bool(reply.status == SERVING)


def main(argv: list[str]) -> int:
    if len(argv) != 1:
        sys.stderr.write("usage: python -m rpc.probe HOST:PORT\n")
        return 2
    return 0 if is_serving(argv[0]) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
