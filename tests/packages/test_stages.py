"""Running installs less than development: what only tests, checks and figures need comes with `make
test`."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
ONLY_FOR_DEVELOPMENT = {"triton", "mypy", "matplotlib", "pytest", "ruff", "hypothesis"}


def commands(target: str, folder: Path) -> list[str]:
    """What `make` would run for a target where nothing is installed."""
    command = ["make", "--dry-run", "--no-print-directory", target, f"VENV={folder}"]
    done = subprocess.run(
        command, cwd=ROOT, env={"PATH": "/usr/bin:/bin"}, check=True, text=True, capture_output=True
    )
    return done.stdout.splitlines()


def names(*requirements: str) -> set[str]:
    return {re.split(r"[^\w.-]", requirement, maxsplit=1)[0] for requirement in requirements}


@pytest.mark.parametrize("target", ["demo", "serve"])
def test_running_installs_what_running_needs(target: str, tmp_path: Path) -> None:
    install, *_ = commands(target, tmp_path)
    assert install == f"scripts/venv.sh {tmp_path} run"
    assert not any(" dev" in command for command in commands(target, tmp_path))
    script = (ROOT / "scripts" / "venv.sh").read_text()
    assert "run) extras=gateway,worker ;;" in script
    running = names(*PROJECT["dependencies"], *EXTRAS["gateway"], *EXTRAS["worker"])
    assert "torch" in running
    assert not running & ONLY_FOR_DEVELOPMENT


@pytest.mark.parametrize("target", ["test", "check", "venv", "docs", "protos", "bench"])
def test_development_adds_the_rest(target: str, tmp_path: Path) -> None:
    installs = [command for command in commands(target, tmp_path) if "venv.sh" in command]
    assert installs == [f"scripts/venv.sh {tmp_path} {stage}" for stage in ("run", "dev")]
    assert names(*EXTRAS["dev"], *EXTRAS["gpu"], *EXTRAS["bench"]) >= ONLY_FOR_DEVELOPMENT
