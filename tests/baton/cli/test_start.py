"""`baton serve|gateway|prefill|decode|version`, up to the point where they become something
else."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import pytest

import baton
import baton.service
from baton.config import ServeOptions
from baton.supervisor import serve_cluster

Run = Callable[..., Any]


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Command lines that this process would have become."""
    commands: list[list[str]] = []
    monkeypatch.setattr(os, "execve", lambda _path, command, _env: commands.append(command))
    return commands


@pytest.mark.parametrize(
    ("command", "module"),
    [("gateway", "gateway"), ("prefill", "prefill_svc"), ("decode", "decode_svc")],
)
def test_a_service_command_becomes_the_service(
    command: str, module: str, run: Run, executed: list[list[str]]
) -> None:
    assert run(command, "some/model", "--port", "7").exit_code == 0
    (got,) = executed
    assert got == [sys.executable, "-P", "-m", module, "--port=7", "--", "some/model"]


def test_a_wrong_option_starts_nothing(run: Run, executed: list[list[str]]) -> None:
    result = run("decode", "m", "--block-size", "0")
    assert (result.exit_code, executed) == (2, [])
    assert result.stderr == "baton decode: error: --block-size=0: give at least 1\n"
    assert run("decode", "m", "--no-such").exit_code == 2
    assert run("decode", "m", "n").exit_code == 2
    assert executed == []


def test_serve_runs_the_supervisor(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[tuple[Any, ...]] = []

    def run_service(*arguments: Any, **_: Any) -> int:
        got.append(arguments)
        return 5

    monkeypatch.setattr(baton.service, "run_service", run_service)
    # The oracle has no checkpoint to look at beforehand.
    assert run("serve", "m", "--engine", "oracle", "--num-decode-workers", "2").exit_code == 5
    options = ServeOptions(model="m", engine="oracle", num_decode_workers=2)
    assert got == [(options, serve_cluster, "serve")]


def test_version(run: Run) -> None:
    assert baton.__version__ in run("version").stdout


def test_help_lists_the_commands(run: Run) -> None:
    text = run("--help").stdout
    for command in ("serve", "gateway", "prefill", "decode", "generate", "chat", "status", "check"):
        assert f"  {command} " in text
