"""One supervised process: start until ready, log, and end."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import time
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from baton.errors import StartupError
from baton.service import EXIT_REFUSED, ReadyReport
from baton.supervisor.feed import Feed
from baton.supervisor.plan import ChildSpec
from baton.types import NumericsClass

logger = logging.getLogger(__name__)

_MAX_LINE_BYTES = 1 << 20
_NUM_LAST_LINES = 20

#: Seconds to exit for a process that has failed to start.
_EXIT_S = 5.0


class ChildFailed(StartupError):
    """A process did not become ready. last_lines: end of its log. model: the model that it could
    not serve; empty for failures of a gateway itself."""

    reason = "CHILD_FAILED"

    def __init__(
        self, name: str, how: str, cause: str, last_lines: tuple[str, ...], model: str = ""
    ) -> None:
        super().__init__(f"{name} did not start ({how}): {cause}", child=name)
        self.last_lines = last_lines
        self.model = model


class Child:
    """Owns one process at a time. `start` may be called again after its end."""

    def __init__(
        self,
        spec: ChildSpec,
        on_line: Callable[[str, str], None],
        environment: Mapping[str, str],
        on_phase: Callable[[str, str], None] = lambda _name, _phase: None,
        feed: Feed | None = None,
        on_number: Callable[[str, int], None] | None = None,
    ) -> None:
        """on_line: receives the child's name and each line of its output.
        on_phase: receives its name and each phase of its start.
        feed: lines for its stdin.
        on_number: receives the model and the number of workers of each line that it writes to
        --number-fd; None: it gets no such option."""
        self.spec = spec
        self._on_line = on_line
        self._on_phase = on_phase
        self._environment = environment
        self._feed = feed
        self._on_number = on_number
        self._numbers: asyncio.Task[None] | None = None
        self._process: Process | None = None
        self._log: asyncio.Task[None] | None = None
        self._last_lines: deque[str] = deque(maxlen=_NUM_LAST_LINES)
        self.report: ReadyReport | None = None
        self.start_s = 0.0

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def pid(self) -> int:
        """Process id of the last start. Raises RuntimeError before the first."""
        if self._process is None:
            raise RuntimeError(f"{self.name} was never started")
        return self._process.pid

    async def start(self, parent_fd: int) -> ReadyReport:
        """Start the process and wait until it is ready. Restarts reuse the ports of the first
        start.

        parent_fd: read end of a pipe; its end of file stops the child. Raises ChildFailed; no
        process is left then.
        """
        begin = time.monotonic()
        spec = self.spec.at_ports(self.report.ports) if self.report else self.spec
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                self._on_phase(self.name, "importing")
                await self._spawn(spec, theirs.fileno(), parent_fd)
            message = await self._last_message(ours)
        self.report = await self._report_from(message)
        self.start_s = time.monotonic() - begin
        self._on_phase(self.name, "ready")
        return self.report

    async def wait(self) -> int:
        """Wait for the end of the process and of its log; return its exit status, -signal if killed
        by one."""
        if self._process is None or self._log is None:
            return 0
        status = await self._process.wait()
        _kill_group(self._process.pid)
        await asyncio.wait({self._log})
        return status

    async def stop(self, grace_s: float) -> None:
        """Ask the process to drain and exit; kill it after `grace_s` seconds."""
        if self._process is None or self._process.returncode is not None:
            return
        self._send(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                await self.wait()
        except TimeoutError:
            logger.warning("%s did not end within %.0f s: killing it", self.name, grace_s)
            await self.kill()

    async def kill(self) -> None:
        """Kill the process."""
        self._send(signal.SIGKILL)
        await self.wait()

    def _send(self, signum: signal.Signals) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(signum)

    async def _spawn(self, spec: ChildSpec, child_fd: int, parent_fd: int) -> None:
        """Start the process in its own session, so that Ctrl-C of the terminal reaches only the
        supervisor, which decides the order."""
        self._last_lines.clear()
        ours, theirs = socket.socketpair() if self._on_number else (None, None)
        more_fds = () if theirs is None else (theirs.fileno(),)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *spec.program,
                f"--ready-fd={child_fd}",
                f"--parent-fd={parent_fd}",
                *(f"--number-fd={fd}" for fd in more_fds),
                *spec.arguments,
                stdin=PIPE if self._feed else DEVNULL,
                stdout=PIPE,
                stderr=STDOUT,
                pass_fds=(child_fd, parent_fd, *more_fds),
                start_new_session=True,
                limit=_MAX_LINE_BYTES,
                env=dict(self._environment),
            )
        except OSError as error:
            if ours is not None:
                ours.close()
            raise ChildFailed(self.name, "no process", str(error), (), self.spec.model) from error
        finally:
            if theirs is not None:
                theirs.close()
        if ours is not None:
            self._numbers = asyncio.create_task(self._read_numbers(ours))
        if self._feed and self._process.stdin:
            self._feed.attach(self._process.stdin)
        self._log = asyncio.create_task(self._forward_log(self._process), name=f"log {self.name}")

    async def _forward_log(self, process: Process) -> None:
        stream = process.stdout
        while stream is not None:
            try:
                data = await stream.readline()
            except ValueError:
                data = b"(a line too long to show)\n"
            if not data:
                return
            line = data.decode(errors="replace").rstrip("\r\n")
            self._last_lines.append(line)
            self._on_line(self.name, line)

    async def _read_numbers(self, end: socket.socket) -> None:
        """Pass on what the process writes, until it ends. Closes `end`."""
        reader, writer = await asyncio.open_connection(sock=end)
        try:
            while line := await reader.readline():
                match _parse_message(line):
                    case {"model": str(model), "workers": int(number)} if self._on_number:
                        self._on_number(model, number)
        finally:
            writer.close()

    async def _last_message(self, end: socket.socket) -> Mapping[str, Any]:
        """The child's last start message; empty if there is none. Closes `end`."""
        reader, writer = await asyncio.open_connection(sock=end)
        try:
            while line := await reader.readline():
                message = _parse_message(line)
                if "phase" in message:
                    self._on_phase(self.name, str(message["phase"]))
                else:
                    return message
        finally:
            writer.close()
        return {}

    async def _report_from(self, message: Mapping[str, Any]) -> ReadyReport:
        if "address" in message:
            numerics = NumericsClass(**message.get("numerics", {}))
            return ReadyReport(
                str(message["address"]),
                message.get("phases", {}),
                numerics,
                message.get("dtype_reason", ""),
                message.get("http_address", ""),
                message.get("sampling_defaults", ""),
            )
        try:
            async with asyncio.timeout(_EXIT_S):
                await self.wait()
        except TimeoutError:
            await self.kill()
        raise self.failure(message.get("error"), message.get("model", ""))

    def failure(self, why: str | None = None, model: str = "") -> ChildFailed:
        """The error for a process that does not run: its own message, or the end of its log.
        model: what a gateway cannot serve."""
        status = self._process.returncode if self._process else None
        lines = tuple(self._last_lines)
        cause = why or next((line for line in reversed(lines) if line.strip()), "it said nothing")
        # A process that reported its failure may have been killed because it exited too slowly.
        how = "refused" if why else describe_exit(status)
        return ChildFailed(self.name, how, cause, lines, self.spec.model or model)


def describe_exit(status: int | None) -> str:
    """An exit status in words."""
    if status is None:
        return "still running"
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return "refused" if status == EXIT_REFUSED else f"exit status {status}"


def _parse_message(line: bytes) -> Mapping[str, Any]:
    """Parse a child's start message; empty for an incomplete line, or if it is no JSON object."""
    try:
        message = json.loads(line)
    except ValueError:
        return {}
    return message if isinstance(message, dict) and line.endswith(b"\n") else {}


def _kill_group(leader: int) -> None:
    """Kill the remaining group of an ended process, which would keep the log open."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
