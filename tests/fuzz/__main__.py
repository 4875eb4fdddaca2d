"""Fuzzes what reads bytes of strangers, guided by coverage (atheris, on libFuzzer).

    python -m tests.fuzz --seconds 3600             an hour, shared by all targets
    python -m tests.fuzz http_bodies --seconds 600  one of them

Begins with tests/fuzz/corpus, and prints a row for each target. A target ends at `--executions`,
or when its share of the time is over; the time that it leaves is shared by those after it, of which
the slow ones are last. Status 1: something was raised that is no refusal, or took more than 30 s or
2 GiB; the input is kept in the folder that is named then.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
#: Where targets write the files that they read: a disk, and a panic's backtrace, take longer than
#: most executions.
_MEMORY = Path("/dev/shm")
_OURS = ["baton", "gateway", "kv_transfer", "worker_core", "engine"]


def fuzz(name: str, seconds: int, num_executions: int, folder: Path) -> None:
    """Does not return."""
    import atheris

    with atheris.instrument_imports(include=_OURS):
        from tests.fuzz.targets import TARGETS, refusing

        run = refusing(TARGETS[name]())
    found = folder / "found"
    found.mkdir(exist_ok=True)
    options = [
        f"-max_total_time={seconds}",
        f"-runs={num_executions}",
        "-timeout=30",
        "-rss_limit_mb=2048",
        "-max_len=4096",
        "-print_final_stats=1",
        "-entropic_scale_per_exec_time=1",  # inputs that run for long are tried less often
        f"-artifact_prefix={folder}/crash-",
    ]
    seeds = CORPUS / name
    atheris.Setup([sys.argv[0], *options, str(found), str(seeds)], run)
    atheris.Fuzz()


def row(name: str, seconds: int, num_executions: int, folder: Path) -> tuple[str, bool]:
    """Fuzz in a process of its own; its row, and whether nothing was found."""
    bounds = [f"--seconds={seconds}", f"--executions={num_executions}", f"--into={folder}"]
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None) as scratch:
        done = subprocess.run(
            [sys.executable, "-m", "tests.fuzz", name, *bounds],
            env={**os.environ, "TMPDIR": scratch, "RUST_BACKTRACE": "0"},
            capture_output=True,
            text=True,
            check=False,
        )
    elapsed_s = time.monotonic() - start_s
    (folder / "log").write_text(done.stdout + done.stderr)
    text = done.stderr + done.stdout
    units = re.search(r"number_of_executed_units: *(\d+)", text)
    covered = re.findall(r"cov: (\d+)", text)
    crashes = sorted(folder.glob("crash-*"))
    is_sound = done.returncode == 0 and not crashes
    what = "0" if is_sound else f"1: {_reason(text)} ({folder})"
    num = f"{int(units[1]):,}" if units else "?"
    edges = covered[-1] if covered else "?"
    return f"| {name} | {elapsed_s:.0f} | {num} | {edges} | {what} |", is_sound


def _reason(text: str) -> str:
    found = re.findall(r"^(?:[\w.]+Error|[\w.]+Exception|==\d+== ?ERROR).*$", text, re.MULTILINE)
    return str(found[-1])[:120] if found else "see its log"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="TARGET", help="all if none is given")
    parser.add_argument("--seconds", type=int, default=3600, help="for all of them together")
    parser.add_argument("--executions", type=int, default=1_000_000, help="at most, of each")
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.into:
        fuzz(arguments.names[0], arguments.seconds, arguments.executions, arguments.into)
    from tests.fuzz.targets import TARGETS  # not before: what it imports would not be instrumented

    names = arguments.names or [*TARGETS]
    base = Path(tempfile.mkdtemp(prefix="baton-fuzz-found-"))
    end_s = time.monotonic() + arguments.seconds
    is_sound = True
    print("| Target | Seconds | Executions | Edges | Found |\n|---|---|---|---|---|", flush=True)
    for index, name in enumerate(names):
        folder = base / name
        folder.mkdir()
        seconds = max(1, int(end_s - time.monotonic()) // (len(names) - index))
        line, is_fine = row(name, seconds, arguments.executions, folder)
        print(line, flush=True)
        is_sound = is_sound and is_fine
    return 0 if is_sound else 1


if __name__ == "__main__":
    sys.exit(main())
