"""One server for all documents and examples: the model in the box, served as the documents say."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator

import pytest

from tests.support.doc_services import BIN, ROOT, environment

Run = Callable[..., "subprocess.CompletedProcess[str]"]


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
        ready = "Baton is ready at "
        line = next((line for line in server.stdout or () if line.startswith(ready)), "")
        if not line:
            pytest.fail(server.communicate()[1])
        yield line.removeprefix(ready).split(": ")[0]
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
