"""What a process has in memory after its imports: measured, where import-linter, which `make check`
runs, reads."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

HEAVY = ("torch", "transformers", "baton_kernels")
LIGHT = (
    "gateway.server",
    "gateway.__main__",
    "baton.client",
    "baton.cli.main",
    "baton.supervisor",
    "baton.rpc.server",
    "baton.service",
    "engine.checkpoint",
    # They import an engine once they know which: the oracle needs none of this.
    "prefill_svc.server",
    "decode_svc.server",
)


def modules_after(statement: str) -> set[str]:
    """Top-level modules loaded in a fresh interpreter by `statement`."""
    script = f"import sys\n{statement}\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_no_torch_in_light_processes() -> None:
    """Not even by way of a library of others, which import-linter does not read. In one process:
    what one brings in, all show."""
    loaded = modules_after(f"import {', '.join(LIGHT)}")
    assert not loaded.intersection(HEAVY)
    assert "grpc" in loaded


def test_the_probe_sees_what_is_there() -> None:
    assert "numpy" in modules_after("import numpy")


def test_the_command_line_starts_without_rich_and_tokenizers() -> None:
    """They are for the commands that print tables, and for the gateway."""
    assert not modules_after("import baton.cli.main").intersection({"rich", "tokenizers"})
