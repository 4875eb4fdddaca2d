"""`baton set-role`: gives a running worker another role."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from baton.cli.connection import Connection, connecting


class Role(StrEnum):
    """Roles as spelled in options. A colocated worker is one of the decode tier."""

    PREFILL = "prefill"
    DECODE = "decode"
    COLOCATED = "colocated"


_WORKER_OF = {Role.PREFILL: "a prefill", Role.DECODE: "a decode", Role.COLOCATED: "a colocated"}


@connecting
def set_role(
    role: Annotated[Role, typer.Argument(help="What the worker is to do from now on.")],
    worker: Annotated[
        str, typer.Option(metavar="WORKER_ID", help="Name of the worker, as in baton status.")
    ],
    connection: Connection,
    timeout_s: Annotated[
        float, typer.Option("--timeout-s", help="Time to wait for the worker, in seconds.")
    ] = 10.0,
) -> None:
    """Change the role of a running worker that a gateway knows: to compute prompts, to decode what
    it is sent, or, colocated, to do both for the same requests. Its running requests finish; new
    requests are placed by the new role. Exit status 1 if the worker is unknown, or does not
    answer."""
    import grpc

    from baton.rpc.channel import sync_channel
    from baton.rpc.status import from_rpc_error
    from baton.types import Tier
    from baton.v1 import worker_pb2, worker_pb2_grpc

    with connection.client(timeout_s=timeout_s) as client:
        known = {status.worker_id: status.address for status in client.model().workers}
    if worker not in known:
        typer.echo(
            f"no worker {worker!r}; there are {', '.join(sorted(known)) or 'none'}", err=True
        )
        raise SystemExit(1)
    is_colocated = role is Role.COLOCATED
    tier = Tier.DECODE if is_colocated else Tier[role.name]
    request = worker_pb2.SetRoleRequest(
        role=worker_pb2.Tier.ValueType(tier), is_colocated=is_colocated
    )
    with sync_channel(known[worker], connection.tls) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        try:
            stub.SetRole(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise from_rpc_error(error, peer="worker", address=known[worker]) from None
    typer.echo(f"{worker} is {_WORKER_OF[role]} worker")
