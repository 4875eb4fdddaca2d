"""Conversations to text, by the model's own template, in a process that is killed when it takes too long."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from baton.errors import BatonError, EngineFault, FieldViolation, InvalidRequest

_log = logging.getLogger(__name__)

RENDER_TIMEOUT_S = 5.0
#: Importing transformers takes a while on a busy machine.
START_TIMEOUT_S = 60.0

#: Longest line either way; a gRPC message is shorter.
_MAX_LINE_BYTES = 128 * 2**20

_MAX_ERROR_CHARS = 300


class ChatRenderer:
    """One renderer process, started when first needed and after each kill; one conversation at a time."""

    def __init__(
        self,
        template: str,
        special_tokens: Mapping[str, str],
        *,
        render_timeout_s: float = RENDER_TIMEOUT_S,
    ) -> None:
        self._start_line = {
            "template": template,
            "special_tokens": dict(special_tokens),
            "render_timeout_s": render_timeout_s,
        }
        self._render_timeout_s = render_timeout_s
        self._turn = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._is_ready = False

    async def render(self, messages: Sequence[tuple[str, str]]) -> str:
        """The text of (role, content) messages, up to where the model is to answer.

        Raises InvalidRequest if the template refuses them or takes too long.
        """
        async with self._turn:
            process = await self._running()
            question = {"messages": [{"role": r, "content": c} for r, c in messages]}
            try:
                async with asyncio.timeout(self._render_timeout_s):
                    answer = await _ask(process, question)
            except TimeoutError:
                await self._kill()
                raise _refusal(
                    f"the chat template took more than {self._render_timeout_s:g} s for these "
                    "messages; send fewer or shorter ones"
                ) from None
            except BaseException:
                # Cancelled or broken in between: the next answer would be this one's.
                await self._kill()
                raise
        if "error" in answer:
            raise _refusal(f"the chat template refuses them: {answer['error'][:_MAX_ERROR_CHARS]}")
        return str(answer["text"])

    async def start(self) -> None:
        """Start the process ahead of the first conversation, without waiting for it to be ready."""
        async with self._turn:
            if self._process is None:
                await self._spawn()

    async def close(self) -> None:
        """End the process."""
        await self._kill()

    async def _running(self) -> asyncio.subprocess.Process:
        """The process, ready to render."""
        process = self._process
        if process is None or process.returncode is not None:
            process = await self._spawn()
        if self._is_ready:
            return process
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await _answer(process)
        except TimeoutError:
            await self._kill()
            raise EngineFault("the chat template renderer did not start in time") from None
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
            "gateway.chat_renderer",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=_MAX_LINE_BYTES,
            env={**os.environ, "TRANSFORMERS_VERBOSITY": "error"},
            start_new_session=True,  # a Ctrl-C at the terminal is for the gateway
        )
        _write(self._process, self._start_line)  # it gets ready while nobody waits
        _log.info("chat template renderer started, pid %s", self._process.pid)
        return self._process

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _ask(process: asyncio.subprocess.Process, question: object) -> dict[str, Any]:
    _write(process, question)
    return await _answer(process)


def _write(process: asyncio.subprocess.Process, line: object) -> None:
    if process.stdin is None:
        raise EngineFault("the chat template renderer has no input")
    process.stdin.write(json.dumps(line).encode() + b"\n")


async def _answer(process: asyncio.subprocess.Process) -> dict[str, Any]:
    if process.stdin is None or process.stdout is None:
        raise EngineFault("the chat template renderer has no pipes")
    try:
        await process.stdin.drain()
        line = await process.stdout.readline()
    except ConnectionError:
        line = b""
    if not line:
        raise EngineFault("the chat template renderer died")
    answer: dict[str, Any] = json.loads(line)
    return answer


def _refusal(description: str) -> BatonError:
    return InvalidRequest.of(FieldViolation("prompt.chat", description))
