"""Every kernel, attention in every tile class, compiles under each Triton that Baton meets: the
newest, which development and the tables have; the image's; and the one that torch 2.11 brings."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu.cases import all_cases
from bench.gpu.compile import MAX_SHARED_BYTES, tile_cases

pytestmark = [pytest.mark.slow, pytest.mark.long]

ROOT = Path(__file__).resolve().parents[2]
OF_IMAGE = re.findall(r"^triton==(\S+)", (ROOT / "deploy/locks/torch-cuda.txt").read_text(), re.M)
ARCH = 90


# An installation, and a minute or two of compiling.
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("version", ["3.6.0", *OF_IMAGE, "3.9.0"])
def test_every_kernel_compiles(version: str, tmp_path: Path) -> None:
    """Without a GPU, for an H100, by the ptxas of that version. Few registers spill."""
    site = tmp_path / "site"
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    installed = subprocess.run(
        [*pip, "--no-deps", "--no-compile", "--target", site, f"triton=={version}"],
        capture_output=True,
        text=True,
        check=False,
    )
    if installed.returncode:
        pytest.skip(f"no package index has triton=={version} here: {installed.stderr[-300:]}")
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu.compile", "--arch", str(ARCH), "--tiles"],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(site), str(ROOT))),
            "TRITON_CACHE_DIR": str(tmp_path / "cache"),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    title, _, *lines = done.stdout.splitlines()
    assert title == f"Triton {version}"
    rows = [line.split(maxsplit=8) for line in lines]
    compiled = {row[8].partition(" / ")[0] for row in rows}
    cases = [(case.name, case) for case in all_cases()]
    cases += [(name, case) for name, case, _ in tile_cases()]
    assert compiled == {name for name, case in cases if case.min_arch <= ARCH}
    for row in rows:
        assert int(row[2]) <= 64, row
        assert float(row[3]) * 1024 <= MAX_SHARED_BYTES[ARCH], row
