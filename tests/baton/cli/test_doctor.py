"""`baton doctor` on good and bad surroundings; the engine's part runs as the process that it is."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.doctor import machine
from baton.doctor.finding import Finding, Level
from engine.doctor import check_model
from tests.support.architectures import make_checkpoint

Run = Callable[..., Any]
BATON = str(Path(sys.executable).with_name("baton"))
BOX = Path(__file__).resolve().parents[3] / "models" / "baton-py-6m"


def findings(*arguments: str, **environment: str) -> tuple[int, dict[str, dict[str, str]]]:
    """Exit status, and the findings by check, of the real command."""
    command = [BATON, "doctor", "--json", *arguments]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, env={**os.environ, **environment}
    )
    return done.returncode, {entry["check"]: entry for entry in json.loads(done.stdout)}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


@pytest.mark.slow
def test_what_is_slow_only_prevents_no_serving() -> None:
    """The bundled model on a machine without native kernels."""
    status, found = findings(str(BOX), "--port", str(free_port()), BATON_CPU_LEVEL="none")
    assert status == 0, found
    assert {"python", "torch", "shared memory", "clock", "weights", "tokenizer"} <= found.keys()
    assert "11.1 MiB" in found["weights"]["found"]
    assert found["CPU kernels"]["level"] == Level.WARNING
    assert "BATON_CPU_LEVEL=none" in found["CPU kernels"]["found"]
    assert found["CPU kernels"]["fix"] == "leave BATON_CPU_LEVEL out"
    assert Level.PROBLEM not in {entry["level"] for entry in found.values()}


@pytest.mark.slow
def test_what_prevents_serving_is_reported_with_its_fix(tmp_path: Path) -> None:
    shutil.copy(BOX / "config.json", tmp_path)
    (tmp_path / "model.safetensors").write_bytes((BOX / "model.safetensors").read_bytes()[:1000])
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        registry = f"redis://127.0.0.1:{closed.getsockname()[1]}/0"
        port = str(taken.getsockname()[1])
        options = (str(tmp_path), "--port", port, "--registry", registry)
        status, found = findings(*options, BATON_CPU_LEVEL="avx1024")
    assert status == 1
    problems = {check for check, entry in found.items() if entry["level"] == Level.PROBLEM}
    assert problems == {"CPU kernels", "address", "registry", "model", "weights", "tokenizer"}
    assert all(found[check]["fix"] for check in problems)
    assert "avx1024" in found["CPU kernels"]["found"]


@pytest.mark.slow
def test_layers_with_a_state_are_told_apart(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "jamba")
    model = next(finding for finding in check_model(str(tmp_path), "auto", 16))
    assert "1 layers with attention and 3 with a state" in model.found


def test_a_wrong_option_is_refused_as_serve_refuses_it(run: Run) -> None:
    result = run("doctor", "--block-size", "999")
    assert result.exit_code == 2
    assert "--block-size=999: give at most 256" in result.stderr


def test_a_machine_without_sealed_memory_is_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    finding = machine.check_shared_memory()
    assert (finding.level, "tcp" in finding.fix) == (Level.WARNING, True)


def test_a_long_temporary_directory_is_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.tempfile, "gettempdir", lambda: "/" + "x" * 100)
    assert "TMPDIR" in machine.check_unix_sockets().fix


def test_a_finding_is_a_line_and_its_fix_another(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    told = [Finding("a", Level.OK, "fine"), Finding("b", Level.PROBLEM, "broken", "mend it")]
    monkeypatch.setattr("baton.doctor.examine", lambda _: iter(told))
    result = run("doctor")
    assert result.exit_code == 1
    assert result.stdout.splitlines() == [
        "ok       a: fine",
        "problem  b: broken",
        "         -> mend it",
    ]
