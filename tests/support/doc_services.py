"""Starts what the documents say serves until it is stopped, as processes of this host, and stops it
as Ctrl-C does."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
MODEL = "models/baton-py-6m"

#: What the documents leave to the reader, on one host.
_HERE = {
    "MODEL": MODEL,
    "prefill-host": "127.0.0.1",
    "decode-host": "127.0.0.1",
    "10.0.0.7": "127.0.0.1",
    "10.0.0.8": "127.0.0.1",
}
#: Smaller than the defaults, and quiet.
_SMALL = {
    "BATON_KV_CACHE_MEMORY_BYTES": "64MiB",
    "BATON_LOG_LEVEL": "warning",
    "BATON_DRAIN_TIMEOUT_S": "5",
    "BATON_HTTP_PORT": "0",
    "BATON_ADVERTISE_HOST": "127.0.0.1",
}


def environment() -> dict[str, str]:
    """Without our own variables, which whoever runs the tests may have set."""
    return {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}


def on_one_host(line: str, places: Mapping[str, str]) -> str:
    """The command with this host's names; `places` says where further ones are."""
    for name, value in {**_HERE, **places}.items():
        line = re.sub(rf"(?<![\w.]){re.escape(name)}(?![\w.])", value, line)
    return line


class Service:
    """One process, with all that it starts."""

    def __init__(self, line: str, variables: Mapping[str, str]) -> None:
        path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
        self.line = line.replace(".venv/bin/", f"{BIN}/")
        self._process = subprocess.Popen(
            ["bash", "-c", f"exec {self.line}"],
            cwd=ROOT,
            env={**environment(), **_SMALL, **variables, "PATH": path},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def ready_line(self) -> str:
        """The line by which it says that it is ready. Fails with its log if it ends before."""
        lines = iter(self._process.stdout or ())
        told = next((line for line in lines if line.startswith("Baton is ready at ")), "")
        if not told:
            self.check(self._process.wait())
        return told

    def check(self, status: int | None = None) -> None:
        """Fails with its log if it has ended."""
        status = self._process.poll() if status is None else status
        assert status is None, f"{self.line} ended with {status}: {self._process.communicate()[1]}"

    def interrupt(self) -> None:
        """Ctrl-C: all of it must end, in order."""
        os.killpg(self._process.pid, signal.SIGINT)
        log = self._process.communicate()[1]
        # `make` passes the signal on, and then ends by it.
        assert self._process.returncode in {0, -signal.SIGINT}, log
        assert "Traceback" not in log, log

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


@contextmanager
def started(line: str, **variables: str) -> Iterator[Service]:
    """Run a command until the block ends."""
    service = Service(line, variables)
    try:
        yield service
        service.interrupt()
    finally:
        service.kill()
