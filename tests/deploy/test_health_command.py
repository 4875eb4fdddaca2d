"""`baton health`, the command that containers are probed with."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import DEVNULL, PIPE

import pytest

from baton.rpc.server import start_server


async def health(*arguments: str) -> tuple[int | None, str]:
    """Exit status and stdout."""
    command = (sys.executable, "-m", "baton", "health", *arguments)
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=DEVNULL)
    out, _ = await process.communicate()
    return process.returncode, out.decode().strip()


@pytest.mark.slow
async def test_it_follows_the_servers_health_and_that_of_a_service() -> None:
    server = await start_server("127.0.0.1:0", lambda _: ["some.Service"], is_serving=True)
    try:
        server.set_serving("some.Service", False)
        address = f"--address={server.address}"
        assert await health(address) == (0, "serving")
        assert await health(address, "--service=some.Service") == (1, "not serving")
        assert (await health(address, "--service=no.Such"))[0] == 1
    finally:
        await server.stop()
    assert (await health(address, "--timeout-s=1"))[0] == 1
