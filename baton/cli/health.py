"""`baton health`: health probe of a process, for containers."""

from __future__ import annotations

from typing import Annotated

import typer

from baton.cli.connection import Connection, connecting


@connecting
def health(
    connection: Connection,
    service: Annotated[
        str, typer.Option(help="Full name of one gRPC service; the whole server if not given.")
    ] = "",
    timeout_s: Annotated[
        float, typer.Option("--timeout-s", help="Time to wait for the answer, in seconds.")
    ] = 5.0,
) -> None:
    """Query the health of a gateway or worker. Exit status 1 if it does not serve, or does not
    answer."""
    with connection.client(timeout_s=timeout_s) as client:
        is_serving = client.health(service)
    typer.echo("serving" if is_serving else "not serving")
    if not is_serving:
        raise SystemExit(1)
