"""Waiting for a gateway that takes requests."""

from __future__ import annotations

import asyncio

import grpc

from baton.errors import StartupError
from baton.rpc.channel import sync_channel
from baton.rpc.tls import TlsFiles

_SERVICE = "baton.v1.InferenceService"
_TIMEOUT_S = 60.0


async def wait_until_serving(
    address: str, timeout_s: float = _TIMEOUT_S, *, tls: TlsFiles | None = None
) -> None:
    """Wait until the gateway's health reports the workers that it needs. tls: None for plain text.

    Raises StartupError after `timeout_s` seconds.
    """
    # Imported late, because child processes are started before and must not wait for it.
    from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

    channel = sync_channel(_here(address), tls)
    request = health_pb2.HealthCheckRequest(service=_SERVICE)
    stub = health_pb2_grpc.HealthStub(channel)
    watch = stub.Watch(request, timeout=timeout_s, wait_for_ready=True)

    def read() -> str:
        try:
            for answer in watch:
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return ""
        except grpc.RpcError as error:
            return str(error.code().name)
        return "the stream ended"

    try:
        why = await asyncio.to_thread(read)
    finally:
        watch.cancel()
        channel.close()
    if why:
        raise StartupError(
            f"the gateway at {address} does not serve ({why}): see its log for the workers' state"
        )


def _here(address: str) -> str:
    """The address for calls within this machine: certificates contain no wildcard address."""
    host, _, port = address.rpartition(":")
    return (
        f"127.0.0.1:{port}" if host == "0.0.0.0" else f"[::1]:{port}" if host == "[::]" else address
    )
