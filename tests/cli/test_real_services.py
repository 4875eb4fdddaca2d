"""`baton serve` with the real services and the oracle engine, used by the other commands."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

BATON = str(Path(sys.executable).with_name("baton"))
MODEL = str(Path(__file__).resolve().parents[2] / "models" / "baton-py-6m")


async def baton(*arguments: str) -> tuple[int | None, str, str]:
    """Exit status, stdout and stderr of one command."""
    process = await asyncio.create_subprocess_exec(BATON, *arguments, stdout=PIPE, stderr=PIPE)
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def lines_until_ready(stdout: asyncio.StreamReader) -> AsyncIterator[str]:
    """What `baton serve` writes, up to the line that says it is ready, or to its end: "" then."""
    line = "-"
    while line and not line.startswith("Baton is ready at "):
        line = (await stdout.readline()).decode()
        yield line


@pytest.fixture
async def address() -> AsyncIterator[str]:
    """A served oracle; at the end, Ctrl-C must end it in order."""
    process = await asyncio.create_subprocess_exec(
        *(BATON, "serve", "--engine", "oracle", "--port", "0", "--log-level", "warning", MODEL),
        stdout=PIPE,
        stderr=PIPE,
    )
    if process.stdout is None:
        pytest.fail("no pipe")
    told = [line async for line in lines_until_ready(process.stdout)]
    line = told[-1]
    assert told[0].startswith("Baton "), told
    if not line.startswith("Baton is ready at "):
        _, log = await process.communicate()
        pytest.fail(log.decode())
    yield line.removeprefix("Baton is ready at ").split(": ")[0]
    process.send_signal(signal.SIGINT)
    _, log = await process.communicate()
    assert process.returncode == 0, log.decode()


async def test_generate_and_status_on_a_served_model(address: str) -> None:
    # One byte per token at most, so that every id is below the oracle's vocabulary; longer than a
    # block.
    flags = ("--address", address, "--max-tokens", "12", "--seed", "7", "--json", "a" * 40)
    status, out, err = await baton("generate", *flags)
    assert status == 0, err
    first = json.loads(out)
    assert len(first["choices"][0]["token_ids"]) == first["usage"]["completion_tokens"] > 0
    again = json.loads((await baton("generate", *flags))[1])
    assert again["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]
    status, out, err = await baton("status", "--address", address, "--json")
    assert status == 0, err
    workers = {worker["worker_id"]: worker for worker in json.loads(out)[0]["workers"]}
    assert set(workers) == {"prefill-0", "decode-0"}


async def test_a_refused_request_is_told(address: str) -> None:
    status, out, err = await baton("generate", "--address", address, "--top-p", "7", "a")
    assert (status, out) == (1, "")
    assert "sampling.top_p" in err
