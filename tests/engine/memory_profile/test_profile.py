"""A whole profile of the bundled model, as the process that it is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
pytestmark = pytest.mark.slow

BATON = str(Path(sys.executable).with_name("baton"))
BOX = Path(__file__).resolve().parents[3] / "models" / "baton-py-6m"


def profile(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [BATON, "profile-memory", str(BOX), *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=250)


@pytest.mark.long
def test_pictures_tables_and_data_are_written(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 90, "output_length": 30}
    trace.write_text("\n".join(json.dumps(line) for _ in range(50)))
    done = profile(
        *(
            "--users=1,3",
            "--num-threads=1",
            "--input-tokens=40",
            "--output-tokens=4",
            "--attention-tokens=64,128",
        ),
        *("--kv-cache-memory-bytes=4MiB", f"--trace={trace}", f"--output={tmp_path / 'out'}"),
    )
    assert done.returncode == 0, done.stderr
    names = ("users", "attention", "waste", "longest")
    for name in names:
        assert (tmp_path / "out" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "out" / "index.html").read_text()
    assert page.count("data:image/png;base64,") == len(names)
    data = json.loads((tmp_path / "out" / "profile.json").read_text())
    assert sorted(data) == sorted(names)
    assert [run["load"]["num_users"] for run in data["users"]] == [1, 3]


def test_a_mistake_is_one_line(tmp_path: Path) -> None:
    done = profile(f"--trace={tmp_path / 'none.csv'}", f"--output={tmp_path}")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "trace=" in done.stderr
