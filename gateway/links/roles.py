"""Orders workers to take roles, by gRPC."""

from __future__ import annotations

import grpc.aio

from baton.rpc.channel import aio_channel
from baton.rpc.tls import TlsFiles
from baton.types import Role
from baton.v1 import worker_pb2, worker_pb2_grpc
from gateway.links.grpc_link import worker_error

_TIMEOUT_S = 5.0


async def set_role(address: str, role: Role, term: int, tls: TlsFiles | None = None) -> None:
    """Return once the worker has the role. term: of the planner's lease; 0: nobody's. Raises
    BatonError."""
    request = worker_pb2.SetRoleRequest(
        role=worker_pb2.Tier.ValueType(role.tier),
        is_colocated=role.is_colocated,
        num_threads=role.num_threads,
        term=term,
    )
    async with aio_channel(address, tls) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        try:
            await stub.SetRole(request, timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise worker_error(error, address) from error
