"""Workers of two hosts each, on network namespaces, under faults: bench.nodes on few streams."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.compose_file import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.long]

FAULTS = (
    "kill a rank of decode host 1",
    "no packet between prefill",
    "20 ms, 2 % lost between tiers",
)
NEEDED = ("ip", "tc", "unshare", "nsenter")


@pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, NEEDED)) or not Path("/dev/net/tun").exists(),
    reason="needs root, iproute2, util-linux and /dev/net/tun",
)
def test_what_hosts_serve_outlives_them(tmp_path: Path) -> None:
    result = tmp_path / "nodes.json"
    options = (
        *(f"--only={fault}" for fault in FAULTS),
        *("--num-requests=6", "--max-tokens=24", "--concurrency=3", f"--json={result}"),
        f"--log-dir={tmp_path}",
    )
    command = (sys.executable, "-m", "bench.nodes", *options)
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert result.exists(), done.stdout + done.stderr
    found = json.loads(result.read_text())
    # A busy machine may be late: the seconds are those of docs/reliability.md.
    assert all(seconds is not None for seconds in found["ended_after_s"].values()), done.stdout
    assert len(found["ended_after_s"]) == 2
    assert found["num_leaked_blocks"] == 0
    for fault in found["faults"]:
        assert (fault["num_wrong"], fault["num_errors"]) == (0, 0), done.stdout
    assert all(fault["num_streams"] for fault in found["faults"][1:])
