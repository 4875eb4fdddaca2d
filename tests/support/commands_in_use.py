"""Commands of Baton as processes of their own, as operators start them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

BATON = str(Path(sys.executable).with_name("baton"))

#: Oracle engines of 5 ms a step, with a small memory.
ORACLE = ("--engine=oracle", "--oracle-step-ms=5", "--num-gpu-blocks-override=256")


@contextmanager
def running(
    command: Sequence[str], log: Path, out: IO[Any] | int = subprocess.PIPE, **env: str
) -> Iterator[subprocess.Popen[str]]:
    """`baton COMMAND`, killed at the end if it still runs. log: gets its stderr. out: gets its
    stdout."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
    with (
        log.open("w") as stderr,
        subprocess.Popen(
            [BATON, *command],
            env={**kept, "HF_HUB_OFFLINE": "1", **env},
            stdout=out,
            stderr=stderr,
            text=True,
        ) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def address_of(process: subprocess.Popen[str], log: Path) -> str:
    """The gateway's address of a `baton serve`, once it is ready."""
    for line in process.stdout or ():
        if line.startswith("Baton is ready at "):
            return line.removeprefix("Baton is ready at ").split(": ")[0]
    raise AssertionError(log.read_text())


def http_url_of(process: subprocess.Popen[str]) -> str:
    """The gateway's HTTP URL, after address_of."""
    line = next(line for line in process.stdout or () if line.startswith("  or:  curl "))
    found = re.search(r"http://[^/]+", line)
    assert found, line
    return found[0]
