"""Runs `baton` commands, each in a fork of one process that has imported everything: imports are
paid for once.

    python -m tests.support.forked_commands

On standard input {"command": [...], "env": {...}}, on standard output {"status": ..., "stdout":
..., "stderr": ...}, one a line. Where a command's process would become another program, `python -P
-m MODULE ARGUMENTS`, the module is run in it instead. It ends without taking the interpreter apart,
which would touch all memory that was imported into: what a process says then is for tests of real
processes.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, Self

from baton.grpc_environment import GRPC_ENVIRONMENT

#: What commands import when they run.
MODULES = (
    "baton.cli.main",
    "engine.torch.engine",
    "gateway.server",
    "prefill_svc.server",
    "decode_svc.server",
)


class ForkedCommands:
    """The process, from `with` to its end."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """environment: of the process, and so for what is read on import."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            env={**environment, **GRPC_ENVIRONMENT},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(
        self, command: Sequence[str], environment: Mapping[str, str]
    ) -> subprocess.CompletedProcess[str]:
        """`baton COMMAND` with that environment alone."""
        process = self._process
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("no pipes")
        process.stdin.write(json.dumps({"command": command, "env": dict(environment)}) + "\n")
        process.stdin.flush()
        done = json.loads(process.stdout.readline())
        return subprocess.CompletedProcess(
            command, done["status"], stdout=done["stdout"], stderr=done["stderr"]
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()


def main() -> None:
    """Serve until the end of standard input."""
    for name in MODULES:
        importlib.import_module(name)
    for line in sys.stdin:
        request = json.loads(line)
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            pid = os.fork()
            if not pid:
                os._exit(status_of(request["command"], request["env"], out.fileno(), err.fileno()))
            _, status = os.waitpid(pid, 0)
            told: dict[str, Any] = {"status": os.waitstatus_to_exitcode(status)}
            for name, file in (("stdout", out), ("stderr", err)):
                file.seek(0)
                told[name] = file.read().decode()
        print(json.dumps(told), flush=True)


def status_of(command: list[str], environment: dict[str, str], out: int, err: int) -> int:
    """Exit status of the command, run here."""
    with open(os.devnull, "rb") as nothing:
        for source, target in ((nothing.fileno(), 0), (out, 1), (err, 2)):
            os.dup2(source, target)
    os.environ.clear()
    os.environ.update(environment)
    os.execve = run_module  # type: ignore[assignment]
    main_module: Any = importlib.import_module("baton.cli.main")
    try:
        main_module.app(args=command, prog_name="baton")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def run_module(_path: str, command: list[str], environment: dict[str, str]) -> NoReturn:
    """In place of os.execve."""
    os.environ.clear()
    os.environ.update(environment)
    module = command[command.index("-m") + 1]
    sys.argv = [module, *command[command.index("-m") + 2 :]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    raise SystemExit(0)


if __name__ == "__main__":
    main()
