"""`python -m bench.gpu --dry-run`: all of the GPU benchmark, in miniature and without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

pytestmark = [pytest.mark.slow, pytest.mark.long]


# Minutes of computing: on a busy machine more than others may take.
@pytest.mark.timeout(1200)
def test_dry_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.gpu", "--dry-run", "--out", str(tmp_path)]
    command += ["--item-s", "1000", "--total-s", "1100", "--rehearsal-processes", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    (path,) = tmp_path.glob("gpu-*.json")
    told = json.loads(path.read_text())
    failed = [item for item in told["items"] if item["failure"]]
    assert not failed
    wrong = [item for item in told["items"] if item["result"].get("verdict") == "WRONG"]
    assert not wrong
    assert done.returncode == 0, done.stderr[-3000:]
    assert told["dry_run"]
    names = {item["name"] for item in told["items"]}
    assert {
        "roof copy",
        "check engine",
        "attention prefill 8K",
        "mixed load, two processes",
        "engine decode 64 x 1K, 8 adapters",
        "engine decode 16 x 1K, states of Granite 4.0 H Micro",
        "service, Qwen3-8B shapes",
    } <= names
    assert path.with_suffix(".md").is_file()
    _, *lines = map(json.loads, path.with_suffix(".jsonl").read_text().splitlines())
    assert lines == told["items"]
    assert lines[0]["name"] == "rehearsal"
    assert not lines[0]["result"].get("not_run")
