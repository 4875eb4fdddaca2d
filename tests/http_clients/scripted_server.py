"""`vllm serve` of the scripted model as a process, for suites of one server."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

SERVE = Path(__file__).parent / "vllm_suite" / "serve.py"
START_S = 300.0


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextlib.contextmanager
def scripted_server(*options: str) -> Iterator[str]:
    """Its URL, without /v1."""
    port = free_port()
    command = [sys.executable, "-W", "ignore", SERVE, "serve", "scripted", *options]
    with subprocess.Popen([*command, "--port", str(port)]) as process:
        url = f"http://127.0.0.1:{port}"
        try:
            wait_for(f"{url}/health", process)
            yield url
        finally:
            process.terminate()


def wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    """Until the URL answers. Raises RuntimeError if the process ends, or takes too long."""
    deadline = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(URLError, ConnectionError), urlopen(url, timeout=5):
            return
        time.sleep(0.2)
    raise RuntimeError(f"nothing came up at {url}")
