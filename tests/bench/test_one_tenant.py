"""Doors and background loads of `python -m bench.one_tenant`."""

from __future__ import annotations

import asyncio

import pytest

from baton.errors import Overloaded
from bench.drive import meanwhile
from bench.one_tenant import Asked, HttpDoor


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200 OK\r\n"])
async def test_a_connection_that_breaks_is_an_error_of_that_request(sent: bytes) -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(sent)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1")
    port = server.sockets[0].getsockname()[1]
    async with server:
        assert (await HttpDoor(f"127.0.0.1:{port}", {}).ask(Asked("other", 1))).error


async def test_a_client_leaves_at_its_deadline() -> None:
    has_left = asyncio.Event()

    async def stay_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        has_left.set()

    server = await asyncio.start_server(stay_silent, "127.0.0.1")
    port = server.sockets[0].getsockname()[1]
    async with server:
        answered = await HttpDoor(f"127.0.0.1:{port}", {}).ask(Asked("other", 1, timeout_s=0.05))
        await has_left.wait()
    assert answered.error == "gave up"


async def test_a_load_that_breaks_off_is_not_overlooked() -> None:
    async def refused() -> None:
        raise Overloaded("full")

    async def broken() -> None:
        raise OSError("broken")

    async with meanwhile(asyncio.sleep(60), refused()):
        pass
    with pytest.raises(OSError, match="broken"):
        async with meanwhile(asyncio.sleep(60), broken()):
            pass
