"""A helper process that answers one question at a time, and is killed when it takes too long: how
it is asked, and what runs in it, within limits of memory and time.

JSON lines. First in: what the helper is made with, and "answer_timeout_s"; first out: {"ready":
true}. Then one line out for each line in. A long "text" of a question or an answer follows its line
as it is, with its length there as "num_text_bytes": the process that asks serves other requests
meanwhile, and to write megabytes as JSON holds the interpreter. An answer that takes twice its time
ends the process (SIGALRM), in case no parent is left to kill it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.errors import EngineFault

#: Characters of text from which on it follows its line.
_LONG_TEXT_CHARS = 65_536

_TEXT_BYTES = "num_text_bytes"

#: A question to its answer; both are the objects of one line.
Answer = Callable[[Mapping[str, Any]], Mapping[str, Any]]

#: Makes the helper from its first line.
Make = Callable[[Mapping[str, Any]], Answer]


def limit_memory(num_bytes: int) -> None:
    """Let the process have at most this much address space."""
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))


def address_space_bytes() -> int:
    """The address space that the process has now."""
    num_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    return num_pages * resource.getpagesize()


def serve(make: Make) -> None:
    """Answer what comes on stdin until it ends."""
    questions, answers = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # what a library prints is no answer
    start = json.loads(questions.readline() or "null")
    if start is None:
        return
    answer_of = make(start)
    answers.writelines(to_parts({"ready": True}))
    answers.flush()
    for line in questions:
        signal.setitimer(signal.ITIMER_REAL, 2 * start["answer_timeout_s"])
        question = json.loads(line)
        if num_bytes := num_text_bytes(question):
            question["text"] = text_of(questions.read(num_bytes))
        parts = to_parts(answer_of(question))
        signal.setitimer(signal.ITIMER_REAL, 0)
        answers.writelines(parts)
        answers.flush()


def to_parts(message: Mapping[str, Any]) -> tuple[bytes, ...]:
    """A question or an answer as it travels, one part after the other: its line, and its text if
    that is long."""
    text = message.get("text")
    if not isinstance(text, str) or len(text) < _LONG_TEXT_CHARS:
        return (json.dumps(message).encode() + b"\n",)
    raw = text.encode(errors="surrogatepass")
    line = json.dumps({**message, "text": "", _TEXT_BYTES: len(raw)})
    return line.encode() + b"\n", raw


def text_of(raw: bytes) -> str:
    """The text that followed a line."""
    return raw.decode(errors="surrogatepass")


def num_text_bytes(message: Mapping[str, Any]) -> int:
    """Bytes that follow a message's line, and are its text; 0 if its line has all of it."""
    return int(message.get(_TEXT_BYTES, 0))


_log = logging.getLogger(__name__)

#: Imports take a while on a busy machine.
START_TIMEOUT_S = 60.0

#: Longest line either way; a gRPC message is shorter.
_MAX_LINE_BYTES = 128 * 2**20


#: Bytes that are given to the process in one go.
_WRITTEN_BYTES = 2**20

#: How a process dies of a question: no memory, no stack.
_DEADLY = frozenset({-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS})


class ChildDied(EngineFault):
    """The process ended before it answered. returncode: as of asyncio's processes, -N for signal
    N."""

    def __init__(self, name: str, returncode: int) -> None:
        super().__init__(f"the {name} died")
        self.returncode = returncode

    @property
    def is_of_its_question(self) -> bool:
        """Whether it died as a process does that has no memory or no stack left."""
        return self.returncode in _DEADLY


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """name: for logs and errors. module: run with -m, a caller of gateway.intake.child.
    start_line: what it is made with."""

    name: str
    module: str
    start_line: dict[str, Any]
    answer_timeout_s: float


class ChildProcess:
    """Started when first needed and after each kill. Belongs to one event loop."""

    def __init__(self, spec: ChildSpec) -> None:
        self._spec = spec
        self._turn = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._is_ready = False

    @property
    def pid(self) -> int | None:
        """Of the process, if there is one."""
        return self._process.pid if self._process else None

    async def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to one question.

        Raises TimeoutError if it takes more than answer_timeout_s, not counting the start and those
        before it, and EngineFault if there is no process to ask, or none any more.
        """
        async with self._turn:
            process = await self._running()
            try:
                async with asyncio.timeout(self._spec.answer_timeout_s):
                    await self._write(process, question)
                    return await self._answer(process)
            except BaseException:
                # Late, cancelled or broken in between: the next answer would be this one's.
                await self._kill()
                raise

    async def start(self) -> None:
        """Start the process ahead of the first question, without waiting for it to be ready."""
        async with self._turn:
            if self._process is None:
                await self._spawn()

    async def close(self) -> None:
        """End the process."""
        await self._kill()

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
            await self._kill()
            raise EngineFault(f"the {self._spec.name} did not start in time") from None
        except BaseException:
            await self._kill()
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
            env={**os.environ, "TRANSFORMERS_VERBOSITY": "error"},
            start_new_session=True,  # a Ctrl-C at the terminal is for the gateway
        )
        start_line = {**self._spec.start_line, "answer_timeout_s": self._spec.answer_timeout_s}
        await self._write(self._process, start_line)  # it gets ready while nobody waits
        _log.info("%s started, pid %s", self._spec.name, self._process.pid)
        return self._process

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()

    async def _write(self, process: asyncio.subprocess.Process, message: Mapping[str, Any]) -> None:
        """Megabytes are copied as the process takes them."""
        if process.stdin is None:
            raise EngineFault(f"the {self._spec.name} has no input")
        for part in to_parts(message):
            view = memoryview(part)
            for begin in range(0, len(part), _WRITTEN_BYTES):
                if process.stdin.is_closing():  # of one that has died: `_answer` says so
                    return
                process.stdin.write(view[begin : begin + _WRITTEN_BYTES])
                with contextlib.suppress(ConnectionError):  # likewise
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
            # A line that ends in the middle is one that it did not live to finish.
            raise ChildDied(self._spec.name, await process.wait()) from None
        return answer
