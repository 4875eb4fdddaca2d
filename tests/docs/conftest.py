"""One server for all documents and examples: the bundled model, served as the documents say."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest

from baton.client import Client, Completion
from tests.support.doc_services import BIN, ROOT, environment

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def _first_prompt() -> str:
    """What the first request of the README sends."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(r"^head -n (\d+) (\S+) \| .*baton generate - ", readme, re.MULTILINE)
    assert found, "no such request"
    lines = (ROOT / found[2]).read_text().splitlines(keepends=True)
    return "".join(lines[: int(found[1])])


@pytest.fixture(scope="session")
def address(served: tuple[str, Completion]) -> str:
    """host:port of a gateway before one worker of each tier."""
    return served[0]


@pytest.fixture(scope="session")
def first_answer(served: tuple[str, Completion]) -> Completion:
    """The answer to the first request: the prompt of the README's first one."""
    return served[1]


@pytest.fixture(scope="session")
def served() -> Iterator[tuple[str, Completion]]:
    """The server's address, and its first answer. Ctrl-C ends it in order."""
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
        address = line.removeprefix(ready).split(": ")[0]
        with Client(address) as client:
            deadline_s = time.monotonic() + 60
            while not all(worker.state == "ready" for worker in client.model().workers):
                assert time.monotonic() < deadline_s
                time.sleep(0.02)  # the next load report; asking again is all that a client can do
            first = client.generate(_first_prompt(), max_tokens=4)
        yield address, first
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
