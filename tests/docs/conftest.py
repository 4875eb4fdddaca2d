"""One server for all documents and examples: the model in the box, served as the documents say."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def environment() -> dict[str, str]:
    """Without our own variables, which whoever runs the tests may have set."""
    return {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    """host:port of a gateway before one worker of each tier. Ctrl-C ends it in order."""
    command = [str(BIN / "baton"), "serve", "models/baton-py-6m", "--port", "0"]
    options = ["--kv-cache-memory-bytes=64MiB", "--log-level=warning", "--drain-timeout-s=5"]
    with subprocess.Popen(
        [*command, *options],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as server:
        line = server.stdout.readline() if server.stdout else ""
        if not line.startswith("Baton is ready at "):
            pytest.fail(server.communicate()[1])
        yield line.removeprefix("Baton is ready at ").split()[0]
        server.send_signal(signal.SIGINT)
        log = server.communicate()[1]
    assert server.returncode == 0, log


@pytest.fixture
def run() -> Run:
    """Runs a program at the root of the repository; stdout and stderr come as one text."""

    def run_one(command: list[str], **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=ROOT,
            env={**environment(), **env},
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return run_one
