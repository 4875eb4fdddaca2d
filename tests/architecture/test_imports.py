"""What a process has in memory after its imports: measured, where import-linter reads."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "baton_kernels")


def modules_after(statement: str) -> set[str]:
    """Top-level modules loaded in a fresh interpreter by `statement`."""
    script = f"import sys\n{statement}\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "module",
    [
        "gateway.server",
        "baton.client",
        "baton.cli.start",
        "baton.supervisor",
        "baton.rpc.server",
        "baton.service",
        "baton.model.checkpoint",
    ],
)
def test_no_torch_in_light_processes(module: str) -> None:
    loaded = modules_after(f"import {module}")
    assert not loaded.intersection(HEAVY)
    assert "grpc" in loaded


def test_the_probe_sees_torch() -> None:
    assert "torch" in modules_after("import torch")


def test_the_command_line_starts_without_rich_and_tokenizers() -> None:
    """They are for the commands that print tables, and for the gateway."""
    assert not modules_after("import baton.cli.main").intersection({"rich", "tokenizers"})
