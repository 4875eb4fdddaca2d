"""A process around a service that does what its model's name says."""

import asyncio
import atexit
import gc
import logging
import socket
import sys

from baton.config import DecodeOptions
from baton.errors import ModelError
from baton.service import OnReady, ReadyReport, main


async def serve(options: DecodeOptions, stop: asyncio.Event, on_ready: OnReady) -> None:
    """Pretend to serve."""
    if options.model == "refuse":
        raise ModelError("no such\nweights")
    if options.model == "break":
        raise ZeroDivisionError
    if options.model == "connect":  # by the loop that real services run in
        await echo_until_closed()
    on_ready(ReadyReport("127.0.0.1:5", {"load": 0.5}))
    logging.getLogger("fake").info("at work", extra={"request_id": "r1"})
    await stop.wait()
    if options.model == "deaf":
        sys.stdout.write("will not stop\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


async def echo_until_closed() -> None:
    """Accept a connection, close it, and wait until the other end has seen that."""

    async def close(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(close, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = socket.create_connection(("127.0.0.1", port))
    await asyncio.get_running_loop().run_in_executor(None, client.recv, 1)
    client.close()
    server.close()


def report_frozen() -> None:
    """Print how many objects no collection looks at."""
    sys.stdout.write(f"{gc.get_freeze_count()} frozen\n")


if __name__ == "__main__":
    atexit.register(report_frozen)
    main(DecodeOptions, serve, "decode")
