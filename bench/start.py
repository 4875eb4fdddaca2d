"""Start-up time for a new user: from `baton serve` to its first line, each process's phases, ready,
and a first token.

    python -m bench.start [MODEL] [--runs N]

Each run starts the command as a user does, reads its stdout as it arrives, and sends a request when
it is ready. The first run is not counted: it fills the file cache, and writes Python's bytecode.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping

from baton.client import Client
from bench.machine import describe_machine

_PROMPT = "def fibonacci(n):\n    "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="models/baton-py-6m")
    parser.add_argument("--runs", type=int, default=3, help="that are counted")
    arguments = parser.parse_args()
    print(describe_machine())
    start_once(arguments.model, shows_lines=False)
    runs = [
        start_once(arguments.model, shows_lines=run == arguments.runs - 1)
        for run in range(arguments.runs)
    ]
    for event in runs[0]:
        seconds = [run[event] for run in runs]
        print(
            f"{event:<12} {statistics.median(seconds):5.2f} s   "
            f"({min(seconds):.2f} to {max(seconds):.2f})"
        )


def start_once(model: str, *, shows_lines: bool) -> Mapping[str, float]:
    """Seconds from the start of the command to each event, in order."""
    # Users' Python keeps bytecode of imported modules.
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-m", "baton", "serve", model, "--port=0", "--log-level=warning"]
    begin = time.monotonic()
    events: dict[str, float] = {}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=kept
    ) as process:
        try:
            for line in process.stdout or ():
                now_s = time.monotonic() - begin
                events.setdefault("first line", now_s)
                if shows_lines:
                    print(f"  {now_s:5.2f}  {line.rstrip()}")
                if line.startswith("Baton is ready at "):
                    events["ready"] = now_s
                    address = line.removeprefix("Baton is ready at ").split(": ")[0]
                    break
            else:
                raise SystemExit("baton serve ended before it was ready")
            with Client(address) as client, client.stream(_PROMPT, max_tokens=2) as stream:
                next(iter(stream))
                events["first token"] = time.monotonic() - begin
        finally:
            process.send_signal(signal.SIGINT)
            rest = process.communicate()[0] or ""
    noise = [line for line in rest.splitlines() if "nanobind" in line]
    if noise:
        raise SystemExit(f"{len(noise)} lines of a library at the stop, such as {noise[0]}")
    return events


if __name__ == "__main__":
    main()
