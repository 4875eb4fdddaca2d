"""What every command has: help by -h, a version, completion, and imports that it can do without
left out."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import typer.main

import baton
from baton.cli.main import COMMANDS, app

Run = Callable[..., Any]

#: What may take long to import: none of it before the first line of `baton serve`, and none for a
#: list of commands.
HEAVY = ("pydantic", "pydantic_settings", "grpc", "torch", "uvloop", "rich", "tokenizers")


@pytest.mark.parametrize("name", [*COMMANDS, ""])
def test_every_command_has_help_by_a_letter(name: str, run: Run) -> None:
    arguments = [name] if name else []
    short, long = (run(*arguments, flag) for flag in ("-h", "--help"))
    assert (short.exit_code, short.stdout) == (0, long.stdout)
    assert "Usage: " in short.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_says_of_each_command_what_its_own_help_says(name: str) -> None:
    group: Any = typer.main.get_command(app)
    command = group.get_command(typer.Context(group), name)
    told = " ".join((command.help or "").split())
    assert told.startswith(COMMANDS[name][2].rstrip(".")), told


def test_the_version_is_an_option_too(run: Run) -> None:
    assert run("--version").stdout == f"baton {baton.__version__}\n"


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("baton serve --num-pre", "--num-prefill-workers"),
        ("baton st", "status"),
        ("baton status --bl", "--blocks"),
    ],
)
def test_a_shell_completes_commands_and_options(line: str, wanted: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "baton"],
        env={
            **os.environ,
            "_BATON_COMPLETE": "complete_bash",
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(line.split()) - 1),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == [wanted], done.stderr


def modules_at(statement: str, marker: str) -> set[str]:
    """Top-level modules that a process has when it first writes `marker` to stdout, while it runs
    `statement`."""
    script = f"""
import sys
class Out:
    def write(self, text):
        if {marker!r} in text:
            sys.__stdout__.write(" ".join({{name.partition(".")[0] for name in sys.modules}}))
            sys.__stdout__.flush()
            import os
            os._exit(0)
    def flush(self): pass
    def isatty(self): return False
sys.stdout = Out()
{statement}
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_the_first_line_of_serve_comes_before_anything_heavy_is_imported() -> None:
    """A test of order: whatever the machine does, the line is written first."""
    start = "from baton.cli.main import app; app(['serve', 'no/such/model'])"
    loaded = modules_at(start, "is starting")
    assert "typer" in loaded
    assert not loaded.intersection(HEAVY)


def test_the_list_of_commands_needs_nothing_heavy() -> None:
    loaded = modules_at("from baton.cli.main import app; app(['--help'])", "Usage: ")
    assert not loaded.intersection(HEAVY)


@pytest.mark.slow
def test_a_model_that_is_not_there_is_told_once_and_no_process_is_started() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "baton", "serve", "./no/such/model", "--port=0"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("baton serve: error: MODEL=./no/such/model: no such folder")
    assert done.stdout == f"Baton {baton.__version__} is starting\n"
