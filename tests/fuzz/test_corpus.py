"""What was found by fuzzing, or is where it begins, again: without atheris, in milliseconds.
`python -m tests.fuzz` goes on from here."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from tests.fuzz.__main__ import CORPUS
from tests.fuzz.targets import TARGETS, refusing


@pytest.mark.parametrize("name", [*TARGETS])
def test_the_corpus_is_taken_or_refused(name: str) -> None:
    run = refusing(TARGETS[name]())
    seeds = sorted((CORPUS / name).iterdir())
    assert seeds
    for seed in seeds:
        run(seed.read_bytes())
        # Cut off anywhere, and with a byte changed.
        for at in range(0, len(data := seed.read_bytes()), max(1, len(data) // 16)):
            run(data[:at])
            run(data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :])


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris is not installed")
def test_two_minutes_find_nothing() -> None:
    command = [sys.executable, "-m", "tests.fuzz", "--seconds=120"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
