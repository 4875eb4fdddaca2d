"""`vllm serve` of the scripted model as a process, for suites of one server."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.request import urlopen

from tests.http_clients.suite import Outcomes, run_pytest
from tests.support.metrics_page import free_ports

SERVE = Path(__file__).parent / "vllm_suite" / "serve.py"
START_S = 300.0


@contextlib.contextmanager
def scripted_server(*options: str) -> Iterator[str]:
    """Its URL, without /v1."""
    (port,) = free_ports(1)
    command = [sys.executable, "-W", "ignore", SERVE, "serve", "scripted", *options]
    with subprocess.Popen([*command, "--port", str(port)]) as process:
        url = f"http://127.0.0.1:{port}"
        try:
            wait_for(f"{url}/health", process)
            yield url
        finally:
            process.terminate()


def run_file(
    file: Path, tests: Sequence[str], server: Sequence[str], options: Sequence[str] = ()
) -> Outcomes:
    """Run a file of tests, or only the named ones, in .venv-frameworks, with the server's BASE_URL.
    server: its options. options: of pytest."""
    chosen = [f"-k={' or '.join(tests)}"] if tests else []
    with tempfile.TemporaryDirectory() as made, scripted_server(*server) as url:
        environment = {"BASE_URL": f"{url}/v1", "REPORT": f"{made}/report.xml", "PYTHONPATH": ""}
        return run_pytest("frameworks", file.parent, [file.name, *options, *chosen], environment)


def wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    """Until the URL answers. Raises RuntimeError if the process ends, or takes too long."""
    deadline = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), urlopen(url, timeout=5):
            return
        time.sleep(0.2)
    raise RuntimeError(f"nothing came up at {url}")
