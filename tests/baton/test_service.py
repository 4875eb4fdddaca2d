"""One process: readiness, signals, exit status."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

FAKE = str(Path(__file__).with_name("fake_main.py"))


class Started:
    """A service process, and our end of its ready channel."""

    def __init__(self, process: Process, ready: asyncio.StreamReader) -> None:
        self.process = process
        self.ready = ready

    async def ended(self) -> tuple[int | None, list[str]]:
        _, log = await self.process.communicate()
        return self.process.returncode, log.decode().splitlines()


@pytest.fixture
async def writers() -> AsyncIterator[list[asyncio.StreamWriter]]:
    opened: list[asyncio.StreamWriter] = []
    yield opened
    for writer in opened:
        writer.close()
        await writer.wait_closed()


async def start(
    writers: list[asyncio.StreamWriter], *arguments: str, parent_fd: int = -1
) -> Started:
    ours, theirs = socket.socketpair()
    with theirs:
        fds = [theirs.fileno()]
        extra = []
        if parent_fd >= 0:
            fds.append(parent_fd)
            extra = [f"--parent-fd={parent_fd}"]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, FAKE, f"--ready-fd={theirs.fileno()}", *extra, *arguments),
            stdout=PIPE,
            stderr=PIPE,
            pass_fds=fds,
        )
    reader, writer = await asyncio.open_connection(sock=ours)
    writers.append(writer)
    return Started(process, reader)


async def test_a_connection_is_closed_where_standard_streams_were_closed() -> None:
    """It would get the number of one, which libuv does not close."""
    closed = 'exec 0<&- && exec "$@"'
    process = await asyncio.create_subprocess_exec(
        *("sh", "-c", closed, "sh", sys.executable, FAKE, "connect"), stderr=PIPE
    )
    assert process.stderr is not None
    async for line in process.stderr:
        if b"127.0.0.1:5" in line:
            break
    process.terminate()
    await process.communicate()
    assert process.returncode == 0


async def test_ready_is_reported_once_and_a_signal_ends_it(
    writers: list[asyncio.StreamWriter],
) -> None:
    service = await start(writers, "m")
    line = await service.ready.readline()
    assert json.loads(line) == {"address": "127.0.0.1:5", "phases": {"load": 0.5}}
    assert await service.ready.read() == b""
    service.process.terminate()
    output, log = await service.process.communicate()
    assert service.process.returncode == 0
    # Libraries print what would not be collected at the end.
    assert output == b"0 frozen\n"
    entries = [json.loads(line) for line in log.splitlines()]
    assert {entry["process"] for entry in entries} == {"decode"}
    assert [entry.get("request_id") for entry in entries if entry["logger"] == "fake"] == ["r1"]


async def test_a_start_that_is_refused_is_reported_to_who_started_it_and_status_2(
    writers: list[asyncio.StreamWriter],
) -> None:
    service = await start(writers, "refuse")
    assert json.loads(await service.ready.read()) == {
        "error": "no such weights",
        "reason": "MODEL",
    }
    # Whoever reads that shows it; a second time would be one too many.
    assert await service.ended() == (2, [])


async def test_a_wrong_option_is_one_line_and_status_2(
    writers: list[asyncio.StreamWriter],
) -> None:
    service = await start(writers, "m", "--block-size=0")
    assert await service.ended() == (2, ["baton decode: error: --block-size=0: give at least 1"])


async def test_a_bug_is_no_refusal(writers: list[asyncio.StreamWriter]) -> None:
    service = await start(writers, "break")
    status, log = await service.ended()
    assert status == 1
    assert log[-1] == "ZeroDivisionError"


async def test_a_second_signal_ends_it_at_once(writers: list[asyncio.StreamWriter]) -> None:
    service = await start(writers, "deaf")
    await service.ready.readline()
    service.process.send_signal(signal.SIGINT)
    if service.process.stdout is None:
        pytest.fail("no pipe")
    assert await service.process.stdout.readline() == b"will not stop\n"
    service.process.send_signal(signal.SIGINT)
    status, _ = await service.ended()
    assert status == 128 + signal.SIGINT


async def test_the_end_of_the_supervisor_ends_it(writers: list[asyncio.StreamWriter]) -> None:
    lifeline, ours = os.pipe()
    service = await start(writers, "m", parent_fd=lifeline)
    os.close(lifeline)
    await service.ready.readline()
    os.close(ours)
    status, log = await service.ended()
    assert status == 0
    assert any("supervisor is gone" in line for line in log)
