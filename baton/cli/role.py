"""`baton set-role`: moves a running worker to the other tier."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from baton.cli.connection import Connection, connecting


class Role(StrEnum):
    """Tiers as spelled in options."""

    PREFILL = "prefill"
    DECODE = "decode"


@connecting
def set_role(
    role: Annotated[Role, typer.Argument(help="Tier that the worker is to serve from now on.")],
    worker: Annotated[
        str, typer.Option(metavar="WORKER_ID", help="Name of the worker, as in baton status.")
    ],
    connection: Connection,
    timeout_s: Annotated[
        float, typer.Option("--timeout-s", help="Time to wait for the worker, in seconds.")
    ] = 10.0,
) -> None:
    """Change the tier of a running worker that a gateway knows. Its running requests finish; new
    requests are placed by the new tier. Exit status 1 if the worker is unknown, or does not
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
    tier = worker_pb2.Tier.ValueType(Tier[role.name])
    with sync_channel(known[worker], connection.tls) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        try:
            stub.SetRole(worker_pb2.SetRoleRequest(role=tier), timeout=timeout_s)
        except grpc.RpcError as error:
            raise from_rpc_error(error, peer="worker", address=known[worker]) from None
    typer.echo(f"{worker} serves the {role} tier")
