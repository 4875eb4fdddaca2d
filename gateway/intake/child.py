"""Runs a helper process that answers one question at a time, with limits of memory and time. See
gateway.intake.child_main for its side of the pipes, and the protocol."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.errors import EngineFault
from gateway.intake.child_main import num_text_bytes, text_of, to_parts

_log = logging.getLogger(__name__)

#: Generous, because imports are slow on a loaded machine.
START_TIMEOUT_S = 60.0

#: Maximum line length in both directions; gRPC messages are shorter.
_MAX_LINE_BYTES = 128 * 2**20

#: Bytes written to the process at once.
_WRITTEN_BYTES = 2**20

#: Without threads of tokenizers, one per core even for a single text: their stacks count as memory.
_ENVIRONMENT = {"TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}

#: Return codes of a process that ran out of memory or stack.
_DEADLY = frozenset({-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS})


class ChildDied(EngineFault):
    """The process ended before it answered. returncode: as in asyncio, -N for signal N."""

    def __init__(self, name: str, returncode: int) -> None:
        super().__init__(f"the {name} died")
        self.returncode = returncode

    @property
    def is_of_its_question(self) -> bool:
        """Whether the question caused the death: no memory or stack left."""
        return self.returncode in _DEADLY


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """Command of a helper.

    name: for logs and errors. module: run with -m; calls `serve`. start_line: its configuration.
    """

    name: str
    module: str
    start_line: dict[str, Any]
    answer_timeout_s: float


class ChildProcess:
    """A helper process, started on demand and after each kill. Belongs to one event loop."""

    def __init__(self, spec: ChildSpec) -> None:
        self._spec = spec
        self._turn = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._is_ready = False

    @property
    def pid(self) -> int | None:
        """Id of the running process, if any."""
        return self._process.pid if self._process else None

    async def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Answer one question.

        Raises TimeoutError if the answer takes more than answer_timeout_s, without start and
        queueing, and EngineFault if the process cannot be started or died.
        """
        async with self._turn:
            process = await self._running()
            try:
                async with asyncio.timeout(self._spec.answer_timeout_s):
                    await self._write(process, question)
                    return await self._answer(process)
            except BaseException:
                # After a timeout or cancellation, the next line out would be the answer to this
                # question.
                await self.close()
                raise

    async def start(self) -> None:
        """Start the process ahead of the first question, without waiting for it to be ready."""
        async with self._turn:
            if self._process is None:
                await self._spawn()

    async def _running(self) -> asyncio.subprocess.Process:
        """The process, ready to answer."""
        process = self._process
        if process is None or process.returncode is not None:
            process = await self._spawn()
        if self._is_ready:
            return process
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await self._answer(process)
        except TimeoutError:
            await self.close()
            raise EngineFault(f"the {self._spec.name} did not start in time") from None
        except BaseException:
            await self.close()
            raise
        self._is_ready = True
        return process

    async def _spawn(self) -> asyncio.subprocess.Process:
        self._is_ready = False
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            self._spec.module,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=_MAX_LINE_BYTES,
            env={**os.environ, **_ENVIRONMENT},
            start_new_session=True,  # a terminal's Ctrl-C must reach only the gateway
        )
        start_line = {**self._spec.start_line, "answer_timeout_s": self._spec.answer_timeout_s}
        await self._write(self._process, start_line)  # it initializes in the background
        _log.info("%s started, pid %s", self._spec.name, self._process.pid)
        return self._process

    async def close(self) -> None:
        """Kill the process, and wait for its end."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()

    async def _write(self, process: asyncio.subprocess.Process, message: Mapping[str, Any]) -> None:
        """Write in pieces, as the process reads them."""
        if process.stdin is None:
            raise EngineFault(f"the {self._spec.name} has no input")
        for part in to_parts(message):
            view = memoryview(part)
            for begin in range(0, len(part), _WRITTEN_BYTES):
                if process.stdin.is_closing():  # it died; `_answer` reports it
                    return
                process.stdin.write(view[begin : begin + _WRITTEN_BYTES])
                with contextlib.suppress(ConnectionError):  # reported by `_answer`, too
                    await process.stdin.drain()

    async def _answer(self, process: asyncio.subprocess.Process) -> dict[str, Any]:
        if process.stdin is None or process.stdout is None:
            raise EngineFault(f"the {self._spec.name} has no pipes")
        try:
            await process.stdin.drain()
            answer: dict[str, Any] = json.loads(await process.stdout.readline())
            if num_bytes := num_text_bytes(answer):
                answer["text"] = text_of(await process.stdout.readexactly(num_bytes))
        except (ConnectionError, asyncio.IncompleteReadError, json.JSONDecodeError):
            # The process died within a line.
            raise ChildDied(self._spec.name, await process.wait()) from None
        return answer
