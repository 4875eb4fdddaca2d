"""`baton plan` as the process that it is."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.architectures import make_checkpoint

BATON = str(Path(sys.executable).with_name("baton"))
BOX = Path(__file__).resolve().parents[3] / "models" / "baton-py-6m"


def plan(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [BATON, "plan", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True)


@pytest.mark.slow
def test_this_machine_is_measured() -> None:
    done = plan(str(BOX / "config.json"), "--gpu=cpu", "--gpus=2", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["device"]["adds_up"]
    assert found["device"]["read_bytes_per_s"] > 0
    assert [shape["degrees"]["tensor"] for shape in found["shapes"]] == [1, 1, 2]


@pytest.mark.slow
@pytest.mark.long
def test_layers_with_a_state_by_transformers_code_are_planned(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "jamba")
    done = plan(str(tmp_path), "--gpu=h100", "--gpus=2")
    assert done.returncode == 0, done.stderr
    assert "state" in done.stdout
    (line,) = (text for text in done.stdout.splitlines() if text.startswith("Does not divide"))
    assert "PP2: the model has 1 layers with KV" in line
    assert "TP2 PP1" not in line, "ranks share it by transformers' code"


@pytest.mark.slow
def test_the_engines_refusal_is_the_commands() -> None:
    done = plan(str(BOX), "--gpu=h900")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("baton plan: error: --gpu=h900: use one of ")


def test_a_wrong_option_is_refused_before_the_engine_starts(run: Callable[..., Any]) -> None:
    result = run("plan", "some/model", "--gpus", "0")
    assert result.exit_code == 2
    assert "--gpus=0: give at least 1" in result.stderr
