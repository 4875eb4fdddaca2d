"""Waiting for a gateway's health."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from baton.errors import StartupError
from baton.supervisor.serve import describe_start
from baton.supervisor.serving import wait_until_serving

SERVICE = "baton.v1.InferenceService"
STATUS = health_pb2.HealthCheckResponse


class Gateway:
    """A server with nothing but health, which tells when it is being watched."""

    def __init__(self, server: grpc.Server, servicer: health.HealthServicer, port: int) -> None:
        self.server = server
        self.servicer = servicer
        self.address = f"127.0.0.1:{port}"


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool)
        servicer = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield Gateway(server, servicer, port)
        server.stop(None).wait()


async def test_it_returns_when_the_gateway_serves(gateway: Gateway) -> None:
    gateway.servicer.set(SERVICE, STATUS.SERVING)
    await wait_until_serving(gateway.address)


async def test_a_gateway_without_workers_is_told_after_the_deadline(gateway: Gateway) -> None:
    gateway.servicer.set(SERVICE, STATUS.NOT_SERVING)
    with pytest.raises(StartupError, match=r"does not serve \(DEADLINE_EXCEEDED\)"):
        await wait_until_serving(gateway.address, timeout_s=0.2)


def test_the_start_is_described_by_child() -> None:
    phases = {"decode-0": 2.13, "decode-0 load": 1.9, "decode-0 listen": 0.04, "total": 3.0}
    assert describe_start(phases) == "decode-0 2.1 s (load 1.9 s, listen 0.0 s), total 3.0 s"
