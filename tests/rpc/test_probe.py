"""The health probe's exit codes, which container engines go by."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from rpc.probe import is_serving, main


class Server(NamedTuple):
    address: str
    health: health.HealthServicer


@pytest.fixture
def server() -> Iterator[Server]:
    with ThreadPoolExecutor(2) as threads:
        running = grpc.server(threads)
        servicer = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(servicer, running)
        port = running.add_insecure_port("127.0.0.1:0")
        running.start()
        yield Server(f"127.0.0.1:{port}", servicer)
        running.stop(None).wait()


def test_a_serving_server_is_0(server: Server) -> None:
    server.health.set("", health_pb2.HealthCheckResponse.SERVING)
    assert main([server.address]) == 0


def test_a_server_that_does_not_serve_is_1(server: Server) -> None:
    server.health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    assert main([server.address]) == 1


def test_nobody_there_is_1() -> None:
    assert not is_serving("127.0.0.1:1", timeout_s=2.0)


def test_without_an_address_is_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "HOST:PORT" in capsys.readouterr().err
